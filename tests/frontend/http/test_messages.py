"""Anthropic's messages API, with its SDK: scripted answers in its shapes, a stream equals the whole message."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from cluster.frontend.http.messages_wire import MessagesWire
from cluster.frontend.http.wire import Usage
from cluster.frontend.text import TextDelta, TextEnd
from cluster.frontend.tools.formats import AnswerParser, answer_format
from tests.frontend.grpc.fake import FakeDispatcher, renewed
from tests.frontend.http.opened import Clients, opened
from tests.frontend.http.test_tool_calls import ANSWER, scripted
from tests.frontend.tokenizers import ByteTokenizer, ToolTokenizer
from workers.errors import InvalidRequest
from workers.request import FinishReason

if TYPE_CHECKING:  # else only this file's tests import the SDK: collecting all tests would take a second longer
    from anthropic.types import Message

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENIZER = ToolTokenizer
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "look", "description": "Looks", "input_schema": LOOK},
    {"name": "wait", "input_schema": {"type": "object"}},
]
ASK: dict[str, Any] = {
    "model": "bytes",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "hi"}],
    "stop_sequences": ["END"],
}
RESULT = {"type": "tool_result", "tool_use_id": "t9"}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "blue"}, {"type": "text", "text": "and?"}],
    },
]


@asynccontextmanager
async def sdk(there: Clients) -> AsyncIterator[Any]:
    """Untyped: the tests send what its types forbid."""
    import anthropic

    http = httpx2.AsyncClient(trust_env=False, verify=False)
    url = str(there.http.base_url)
    async with anthropic.AsyncAnthropic(api_key="k", base_url=url, max_retries=0, timeout=30.0, http_client=http) as it:
        yield it


@pytest.fixture
def dispatcher(shared: tuple[FakeDispatcher, Clients]) -> FakeDispatcher:
    return renewed(shared[0], scripted(ANSWER))


@pytest.fixture
def there(shared: tuple[FakeDispatcher, Clients], dispatcher: FakeDispatcher) -> Clients:
    return shared[1]


def shown(message: "Message") -> list[tuple[Any, ...]]:
    """The blocks, without ids."""
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(("text", block.text))
            case "thinking":
                found.append(("thinking", block.thinking))
            case "tool_use":
                assert block.id.startswith("toolu_")
                found.append(("tool_use", block.name, block.input))
    return found


async def streamed(client: Any, **fields: Any) -> "Message":
    """Put together by the SDK, which checks the order of events."""
    async with client.messages.stream(**ASK | fields) as stream:
        async for _ in stream:
            pass
        message: Message = await stream.get_final_message()
        return message


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_blocks_come_in_the_shapes_of_the_sdk(there: Clients, dispatcher: FakeDispatcher, chunk: int) -> None:
    dispatcher.chunk = chunk
    async with sdk(there) as client:
        message = await client.messages.create(**ASK, tools=TOOLS)
        assert shown(message) == [
            ("thinking", "hm\n"),
            ("text", "I look.\n"),
            ("tool_use", "look", {"at": "the sea"}),
            ("tool_use", "wait", {}),
        ]
        assert (message.stop_reason, message.stop_sequence, message.role) == ("stop_sequence", "END", "assistant")
        again = await streamed(client, tools=TOOLS)
        assert (shown(again), again.stop_reason) == (shown(message), message.stop_reason)
        for each in (message, again):
            assert each.usage.output_tokens == len(ANSWER.encode()) + len("END")
            assert each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) > 0


async def test_the_tool_runner_of_the_sdk_goes_on_without_a_thread(there: Clients) -> None:
    """It asks the server to hold the conversation, which is refused, and then sends all of it itself."""
    import anthropic

    @anthropic.beta_async_tool
    async def look(at: str) -> str:
        """Looks."""
        return at

    async with sdk(there) as client:
        runner = client.beta.messages.tool_runner(**ASK, tools=[look])
        assert [block.type async for message in runner for block in message.content][-1] == "tool_use"
        with pytest.raises(anthropic.BadRequestError, match="thread: is unknown"):
            await client.beta.messages.create(**ASK, thread={"type": "create"})


async def test_stop_reasons(there: Clients, dispatcher: FakeDispatcher) -> None:
    async with sdk(there) as client:
        for fields, script, expected in (
            ({"max_tokens": 4}, "abcdefgh", ("max_tokens", None)),
            ({"stop_sequences": ["c", "d"]}, "abcdefgh", ("stop_sequence", "c")),
            ({}, "abEND", ("stop_sequence", "END")),
        ):
            dispatcher.script = scripted(script)
            for message in (await client.messages.create(**ASK | fields), await streamed(client, **fields)):
                assert (message.stop_reason, message.stop_sequence) == expected, fields


@pytest.mark.parametrize(("finish", "reason"), [(FinishReason.EOS, "tool_use"), (FinishReason.LENGTH, "max_tokens")])
async def test_an_answer_that_ends_with_a_call_waits_for_its_result(finish: FinishReason, reason: str) -> None:
    form = answer_format(str(ToolTokenizer.info["chat_template"]), "auto", "auto")
    usage, delta, end = Usage(3, 2), TextDelta(ANSWER, (1, 2), 0), TextEnd(finish)
    wire = MessagesWire("r", "m", partial(AnswerParser, form, {"look": {}, "wait": {}}))
    message = json.loads(wire.document([wire.answer(0, delta, end)], usage))
    assert message["stop_reason"] == reason
    wire = MessagesWire("r", "m", partial(AnswerParser, form, {"look": {}, "wait": {}}))
    events = wire.begin(usage) + wire.part(0, delta, usage) + wire.end(0, end, usage) + wire.last(usage)
    assert f'"stop_reason":"{reason}"'.encode() in events


async def test_a_conversation_reaches_the_template_as_a_chat(there: Clients, dispatcher: FakeDispatcher) -> None:
    """The same prompt as the OpenAI body of the same conversation."""
    chat = [
        {"role": "system", "content": "be\n\nbrief"},
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sea"}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "blue"},
        {"role": "user", "content": "and?"},
    ]
    tools = [
        {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": LOOK}},
        {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}},
    ]
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    async with sdk(there) as client:
        await client.messages.create(**ASK | {"messages": HISTORY}, system=system, tools=TOOLS)
        ours = dispatcher.requests[-1].prompt
        counted = await client.messages.count_tokens(model="bytes", messages=HISTORY, system=system, tools=TOOLS)
    chats: Any = there.openai.chat.completions
    await chats.create(model="bytes", messages=chat, tools=tools, max_tokens=300)
    assert ours == dispatcher.requests[-1].prompt
    assert counted.input_tokens == len(ours)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "wait"}])
async def test_a_choice_is_enforced(there: Clients, dispatcher: FakeDispatcher, choice: dict[str, str]) -> None:
    async with sdk(there) as client:
        await client.messages.create(**ASK, tools=TOOLS, tool_choice=choice)
    assert dispatcher.requests[-1].sampling.grammar is not None


async def test_thinking_is_the_reasoning_of_a_chat(dispatcher: FakeDispatcher) -> None:
    seen: list[Any] = []

    class ThinkingTokenizer(ToolTokenizer):
        def apply_chat_template(
            self, messages: Any, *, tools: Any = (), template_kwargs: Any = None
        ) -> tuple[int, ...]:
            seen.append(dict(template_kwargs or {}))
            return (1,)

    async with opened(dispatcher, ThinkingTokenizer) as (there, _), sdk(there) as client:
        dispatcher.script = scripted("Yes")
        for kind in ("enabled", "disabled", "adaptive"):
            await client.messages.create(**ASK, thinking={"type": kind, "budget_tokens": 1024})
    assert seen == [{"enable_thinking": True}, {"reasoning_effort": "none"}, {}]


async def test_thinking_that_the_template_does_not_know_is_named(dispatcher: FakeDispatcher) -> None:
    class PlainTokenizer(ByteTokenizer):
        def apply_chat_template(
            self, messages: Any, *, tools: Any = (), template_kwargs: Any = None
        ) -> tuple[int, ...]:
            raise InvalidRequest(f"chat_template_kwargs.{next(iter(template_kwargs))}", "is no variable")

    async with opened(dispatcher, PlainTokenizer) as (there, _):
        answer = await there.http.post("/v1/messages", json=ASK | {"thinking": {"type": "enabled"}})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("thinking: ")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "a"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": 3}]}]}, "messages[0].content[0].content"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": "x" * 70000}}}}, "output_config.format."),
        ({"system": "s", "messages": [*HISTORY[1:]]}, ""),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": ["x"]}}, "tool_choice.type"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"nonsense": 1}, "nonsense"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
async def test_wrong_fields_are_named_as_the_client_wrote_them(
    there: Clients, dispatcher: FakeDispatcher, fields: dict[str, Any], field: str
) -> None:
    for stream in (False, True):
        answer = await there.http.post("/v1/messages", json=ASK | fields | {"stream": stream})
        if not field:
            assert answer.status_code == 200, answer.text
            continue
        assert answer.status_code == 400, answer.text
        error = answer.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"].startswith(f"{field}"), error
    if field:
        assert not dispatcher.requests


async def test_a_large_body_is_read_in_the_same_way(there: Clients, dispatcher: FakeDispatcher) -> None:
    import anthropic

    long, metadata = [{"role": "user", "content": "x" * 3000}], {"user_id": "u" * 2000}
    async with sdk(there) as client:
        ask = ASK | {"messages": long, "metadata": metadata, "system": "s"}
        message = await client.messages.create(**ask, tools=TOOLS)
        assert message.stop_reason == "stop_sequence" and shown(message)[-1] == ("tool_use", "wait", {})
        assert len(dispatcher.requests[-1].prompt) > 3000
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]"):
            await client.messages.create(**ask | {"messages": [*long, {"role": "assistant", "content": "a"}]})


async def test_an_unknown_model_is_not_found(there: Clients) -> None:
    import anthropic

    async with sdk(there) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**ASK | {"model": "other"})
    assert "not_found_error" in str(caught.value.body)


async def test_without_a_parser_tools_are_refused(dispatcher: FakeDispatcher) -> None:
    import anthropic

    async with opened(dispatcher, ByteTokenizer) as (there, _), sdk(there) as client:
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            await client.messages.create(**ASK, tools=TOOLS)


async def test_the_key_of_the_sdk_is_accepted(tmp_path: Path) -> None:
    import anthropic

    (tmp_path / "keys").write_text("a-key-that-is-long-enough\n")
    keys = str(tmp_path / "keys")
    async with opened(FakeDispatcher(), ToolTokenizer, api_keys_file=keys) as (there, _), sdk(there) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**ASK)
        assert "authentication_error" in str(caught.value.body)
        message = await client.with_options(api_key="a-key-that-is-long-enough").messages.create(**ASK)
        assert message.stop_reason == "max_tokens"  # the dispatcher's usual answer never ends
