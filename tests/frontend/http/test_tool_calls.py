"""Tool calls and reasoning in the real SDK's shapes, with scripted answers: a stream equals the whole answer."""

import json
from typing import Any

import pytest
from openai import AsyncStream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.frontend.grpc.fake import FakeDispatcher, renewed
from tests.frontend.http.opened import Clients, opened
from tests.frontend.tokenizers import OpenTokenizer, ToolTokenizer
from workers.request import Request

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENIZER = ToolTokenizer
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]
ASK: dict[str, Any] = {
    "model": "bytes",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 300,
    "stop": "END",
}
ANSWER = """<think>
hm
</think>

I look.
<tool_call>
{"name": "look", "arguments": {"at": "the sea"}}
</tool_call>
<tool_call>
{"name": "wait", "arguments": {}}
</tool_call>"""


@pytest.fixture
def dispatcher(shared: tuple[FakeDispatcher, Clients]) -> FakeDispatcher:
    return renewed(shared[0], scripted(ANSWER))


@pytest.fixture
def there(shared: tuple[FakeDispatcher, Clients], dispatcher: FakeDispatcher) -> Clients:
    return shared[1]


def scripted(*answers: str) -> Any:
    """Answer number `n` of a request is `answers[n]`."""

    def script(request: Request) -> bytes:
        return f"{answers[int(request.id.partition('#')[2] or 0)]}END".encode()

    return script


async def whole(there: Clients, **fields: Any) -> ChatCompletion:
    created: ChatCompletion = await there.openai.chat.completions.create(**ASK | fields)
    return created


async def streamed(there: Clients, **fields: Any) -> list[dict[str, Any]]:
    """The answers, put together from their chunks as clients do."""
    stream: AsyncStream[ChatCompletionChunk] = await there.openai.chat.completions.create(**ASK | fields, stream=True)
    answers: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None})
            answer["content"] += choice.delta.content or ""
            answer["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            answer["finish"] = answer["finish"] or choice.finish_reason
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.index == len(answer["calls"]):
                    assert call.id and call.type == "function" and call.function.name
                    answer["calls"].append([call.function.name, ""])
                else:
                    assert (call.index, call.id, call.function.name) == (len(answer["calls"]) - 1, None, None)
                answer["calls"][-1][1] += call.function.arguments or ""
    return [answers[index] for index in sorted(answers)]


def parts(created: ChatCompletion) -> list[dict[str, Any]]:
    found = []
    for choice in created.choices:
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]
        reasoning = getattr(choice.message, "reasoning_content", "")
        content = choice.message.content or ""
        found.append({"content": content, "reasoning": reasoning, "calls": calls, "finish": choice.finish_reason})
    return found


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_calls_come_in_the_shapes_of_the_sdk(there: Clients, dispatcher: FakeDispatcher, chunk: int) -> None:
    dispatcher.chunk = chunk
    created = await whole(there, tools=TOOLS)
    (answer,) = parts(created)
    assert answer == {
        "content": "I look.\n",
        "reasoning": "hm\n",
        "calls": [["look", '{"at": "the sea"}'], ["wait", "{}"]],
        "finish": "tool_calls",
    }
    ids = [call.id for call in created.choices[0].message.tool_calls or ()]
    assert len(set(ids)) == 2 and all(len(each) == 9 and each.isalnum() for each in ids)
    assert await streamed(there, tools=TOOLS) == [answer]


async def test_content_is_null_beside_calls_and_a_text_without_them(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = scripted('<tool_call>{"name": "wait", "arguments": {}}</tool_call>')
    message = (await whole(there, tools=TOOLS)).choices[0].message
    assert message.content is None and message.tool_calls and not hasattr(message, "reasoning_content")
    dispatcher.script = scripted("")
    message = (await whole(there, tools=TOOLS)).choices[0].message
    assert message.content == "" and message.tool_calls is None


async def test_each_of_several_answers_has_its_own_calls(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = scripted(ANSWER, "No.", '<tool_call>{"name": "wait"}</tool_call>')
    created = parts(await whole(there, tools=TOOLS, n=3))
    assert [each["finish"] for each in created] == ["tool_calls", "stop", "tool_calls"]
    assert [len(each["calls"]) for each in created] == [2, 0, 1]
    assert await streamed(there, tools=TOOLS, n=3) == created


async def test_a_call_that_is_cut_off_ends_with_length(there: Clients, dispatcher: FakeDispatcher) -> None:
    (answer,) = parts(await whole(there, tools=TOOLS, max_tokens=85))
    assert answer["finish"] == "length" and answer["calls"] == [["look", '{"at": "the se']]
    assert await streamed(there, tools=TOOLS, max_tokens=85) == [answer]


async def test_without_parallel_calls_there_is_one(there: Clients) -> None:
    (answer,) = parts(await whole(there, tools=TOOLS, parallel_tool_calls=False))
    assert [name for name, _ in answer["calls"]] == ["look"]


async def test_without_tools_a_call_is_text_and_reasoning_still_apart(
    there: Clients, dispatcher: FakeDispatcher
) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (answer,) = parts(await whole(there, **fields))
        assert (
            answer["reasoning"] == "hm\n" and answer["calls"] == [] and answer["content"].startswith("I look.\n<tool")
        )
        assert json.loads(bytes(dispatcher.requests[-1].prompt))[1] == []


async def test_every_token_has_its_logprobs_while_a_call_is_held_back(
    there: Clients, dispatcher: FakeDispatcher
) -> None:
    asked: dict[str, Any] = ASK | {"tools": TOOLS, "stream": True, "logprobs": True}
    stream: AsyncStream[ChatCompletionChunk] = await there.openai.chat.completions.create(**asked)
    tokens = [
        each.token
        async for chunk in stream
        for choice in chunk.choices
        for each in (choice.logprobs.content or () if choice.logprobs else ())
    ]
    assert "".join(tokens) == ANSWER + "END"


@pytest.mark.parametrize(
    ("choice", "single", "names"),
    [
        ("required", False, ["look", "wait"]),
        ({"type": "function", "function": {"name": "wait"}}, True, ["wait"]),
    ],
)
async def test_a_required_call_is_enforced_by_a_grammar(
    there: Clients, dispatcher: FakeDispatcher, choice: Any, single: bool, names: list[str]
) -> None:
    await whole(there, tools=TOOLS, tool_choice=choice)
    grammar = dispatcher.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "lark"
    assert [name for name in ("look", "wait") if f'\\"name\\": \\"{name}\\"' in grammar.text] == names
    assert ("call)*" in grammar.text) is not single
    await whole(there, tools=TOOLS[1:])
    assert dispatcher.requests[-1].sampling.grammar is None


async def test_strict_tools_and_a_format_are_enforced_where_the_model_decides(
    there: Clients, dispatcher: FakeDispatcher
) -> None:
    schema = {"type": "object", "properties": {"sky": {"type": "boolean"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields, has_text in (({"tools": TOOLS}, True), ({"tools": TOOLS[1:], "response_format": wanted}, False)):
        (answer,) = parts(await whole(there, **fields))
        assert answer["finish"] == "tool_calls"
        grammar = dispatcher.requests[-1].sampling.grammar
        assert grammar is not None and ('"sky"' in grammar.text) is not has_text
    await whole(there, tools=TOOLS[1:], response_format=wanted, tool_choice="required")
    grammar = dispatcher.requests[-1].sampling.grammar
    assert grammar is not None and '"sky"' not in grammar.text
    await whole(there, response_format=wanted)  # behind reasoning
    grammar = dispatcher.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "lark" and '"sky"' in grammar.text


async def test_calls_and_results_reach_the_template(there: Clients, dispatcher: FakeDispatcher) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    ]
    await whole(there, messages=messages, tools=TOOLS)
    seen, tools = json.loads(bytes(dispatcher.requests[-1].prompt))
    call = call | {"function": {"name": "look", "arguments": {"at": "it"}}}
    assert seen == [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "blue", "tool_call_id": "c1", "name": "look"},
    ]
    assert tools == TOOLS


async def test_a_large_body_keeps_its_tools(there: Clients, dispatcher: FakeDispatcher) -> None:
    small = parts(await whole(there, tools=TOOLS))
    assert parts(await whole(there, tools=TOOLS, metadata={"a": "z" * 5000})) == small
    assert json.loads(bytes(dispatcher.requests[-1].prompt))[1] == TOOLS


async def test_the_effort_of_reasoning_reaches_the_template(dispatcher: FakeDispatcher) -> None:
    seen: list[Any] = []

    class EffortTokenizer(ToolTokenizer):
        def apply_chat_template(
            self, messages: Any, *, tools: Any = (), template_kwargs: Any = None
        ) -> tuple[int, ...]:
            seen.append(dict(template_kwargs))
            return (1,)

    async with opened(dispatcher, EffortTokenizer) as (there, _):
        dispatcher.script = scripted("Yes")
        await whole(there, reasoning_effort="low", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        assert seen[-1] == {"reasoning_effort": "low", "enable_thinking": True}
        refused = await there.http.post("/v1/chat/completions", json=ASK | {"reasoning_effort": "much"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")


async def test_reasoning_that_the_prompt_has_begun_is_apart(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher, OpenTokenizer) as (there, _):
        dispatcher.script = scripted("hm</think>Yes")
        (answer,) = parts(await whole(there))
        assert (answer["reasoning"], answer["content"]) == ("hm", "Yes")
        assert await streamed(there) == [answer]
        await whole(there, tools=TOOLS, tool_choice="required")
        grammar = dispatcher.requests[-1].sampling.grammar
        assert grammar is not None and "\nstart: r" in grammar.text


def called(**fields: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}} | fields
    return [{"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [*TOOLS, TOOLS[1]]}, "tools[2].function.name", "another tool"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only 'function'"),
        ({"tools": [TOOLS[1] | {"cache": 1}]}, "tools[0].cache", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x", "not supported"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "a JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
            "must be object",
        ),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": "d" * (256 << 10)}}]},
            "tools",
            "at most 262144",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "go"}}},
            "tool_choice.function.name",
            "none of the tools",
        ),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "no room for a tool call"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "no room for a tool call"),
        ({"tools": TOOLS, "structured_outputs": {"json": "{"}}, "structured_outputs.json", "cannot be read"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "is missing"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "c"}]}, "messages[0].tool_call_id", "no call"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
            "messages[0].tool_calls",
            "only an assis",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
            "only tools",
        ),
        ({"messages": called(id=None)}, "messages[0].tool_calls[0].id", "is missing"),
        ({"messages": called(function={"arguments": "{}"})}, "messages[0].tool_calls[0].function.name", "1 to 64"),
        (
            {"messages": called(function={"name": "a", "arguments": "{"})},
            "messages[0].tool_calls[0].function.arguments",
            "a JSON object",
        ),
        ({"messages": called(type="custom")}, "messages[0].tool_calls[0]", "type 'function'"),
    ],
)
async def test_a_wrong_field_is_named(
    there: Clients, dispatcher: FakeDispatcher, fields: dict[str, Any], param: str, why: str
) -> None:
    for stream in (False, True):
        answer = await there.http.post("/v1/chat/completions", json=ASK | fields | {"stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert why in error["message"]
    assert not dispatcher.requests


async def test_tools_need_a_format_of_calls(dispatcher: FakeDispatcher) -> None:
    """By the chat template, or by name."""
    dispatcher.script = scripted(ANSWER)
    async with opened(dispatcher) as (there, _):
        refused = await there.http.post("/v1/chat/completions", json=ASK | {"tools": TOOLS})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "tools") and "--tool-call-parser" in error["message"]
    async with opened(dispatcher, tool_call_parser="hermes", reasoning_parser="none") as (there, _):
        (answer,) = parts(await whole(there, tools=TOOLS))
        assert len(answer["calls"]) == 2 and answer["content"].startswith("<think>")
    async with opened(dispatcher, ToolTokenizer, tool_call_parser="none") as (there, _):
        refused = await there.http.post("/v1/chat/completions", json=ASK | {"tools": TOOLS})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
