"""OpenAI's responses API, with its SDK: a stream equals the whole answer, and conversations go on."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from cluster.frontend.http.responses_body import ResponseStore
from tests.frontend.grpc.fake import FakeDispatcher, renewed
from tests.frontend.http.opened import Clients
from tests.frontend.http.test_tool_calls import ANSWER
from tests.frontend.tokenizers import ToolTokenizer
from workers.errors import InvalidRequest
from workers.request import Request

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENIZER = ToolTokenizer
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look", "description": "Looks", "parameters": LOOK, "strict": True},
    {"type": "function", "name": "wait", "parameters": {"type": "object"}},
]


@pytest.fixture
def dispatcher(shared: tuple[FakeDispatcher, Clients]) -> FakeDispatcher:
    return renewed(shared[0], lambda request: ANSWER.encode() + b" " * 300)


@pytest.fixture
def there(shared: tuple[FakeDispatcher, Clients], dispatcher: FakeDispatcher) -> Clients:
    return shared[1]


def shown(response: Response) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for item in response.output:
        match item.type:
            case "message":
                found.append((item.status, "".join(getattr(part, "text", "") for part in item.content)))
            case "reasoning":
                found.append((item.status, "".join(part.text for part in item.content or ())))
            case "function_call":
                found.append((item.status, item.name, item.arguments))
    return found


async def streamed(there: Clients, **fields: Any) -> Response:
    """The last event's response, which the events before it have built."""
    numbers, texts, done = [], dict[str, str](), dict[str, str]()
    last: Response | None = None
    client: Any = there.openai
    async for event in await client.responses.create(model="bytes", stream=True, **fields):
        numbers.append(event.sequence_number)
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            done[event.item_id] = event.text
        elif event.type == "response.function_call_arguments.done":
            done[event.item_id] = event.arguments
        elif event.type in ("response.completed", "response.incomplete"):
            last = event.response
    assert numbers == list(range(len(numbers))) and texts == done
    assert last is not None
    return last


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_items_come_in_the_shapes_of_the_sdk(there: Clients, dispatcher: FakeDispatcher, chunk: int) -> None:
    dispatcher.chunk = chunk
    dispatcher.script = lambda request: ANSWER.encode()
    fields: dict[str, Any] = {"input": "hi", "tools": TOOLS, "max_output_tokens": 300}
    whole = await there.openai.responses.create(model="bytes", **fields)
    assert shown(whole) == [
        ("completed", "hm\n"),
        ("completed", "I look.\n"),
        ("completed", "look", '{"at": "the sea"}'),
        ("incomplete", "wait", "{}"),  # the dispatcher's answers end for length
    ]
    assert whole.incomplete_details is not None
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage is not None and whole.usage.output_tokens == len(ANSWER.encode())
    again = await streamed(there, **fields)
    assert (shown(again), again.status, again.usage) == (shown(whole), whole.status, whole.usage)


async def test_a_conversation_goes_on_as_if_it_were_sent_whole(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = lambda request: ANSWER.encode()
    more: dict[str, Any] = {"model": "bytes", "tools": TOOLS, "max_output_tokens": 300}
    first = await there.openai.responses.create(input="look", instructions="be brief", **more)
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [{"type": "function_call_output", "call_id": each.call_id, "output": "blue"} for each in calls]
    second = await there.openai.responses.create(
        input=results, previous_response_id=first.id, instructions="be brief", stream=False, **more
    )
    by_id = dispatcher.requests[-1].prompt
    items: list[Any] = [{"role": "user", "content": "look"}, *(item.to_dict() for item in first.output), *results]
    await there.openai.responses.create(input=items, instructions="be brief", **more)
    assert by_id == dispatcher.requests[-1].prompt
    assert second.previous_response_id == first.id and second.id != first.id
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "I look.\n",
            "reasoning_content": "hm\n",
            "tool_calls": [
                {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in calls
            ],
        },
        *({"role": "tool", "tool_call_id": each.call_id, "content": "blue"} for each in calls),
    ]
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    client: Any = there.openai
    await client.chat.completions.create(model="bytes", messages=chat, tools=tools, max_tokens=300)
    assert by_id == dispatcher.requests[-1].prompt


async def test_what_is_not_stored_is_not_found(there: Clients, dispatcher: FakeDispatcher) -> None:
    kept = await there.openai.responses.create(model="bytes", input="a", max_output_tokens=3)
    dropped = await there.openai.responses.create(model="bytes", input="a", max_output_tokens=3, store=False)
    await there.openai.responses.create(model="bytes", input="b", max_output_tokens=3, previous_response_id=kept.id)
    other = there.openai.with_options(default_headers={"x-diptych-tenant": "other"})
    for client, name in ((there.openai, dropped.id), (there.openai, "resp_x"), (other, kept.id)):
        with pytest.raises(openai.BadRequestError, match="not known to this gateway"):
            await client.responses.create(model="bytes", input="b", previous_response_id=name)


async def test_the_store_is_bounded() -> None:
    store = ResponseStore(most=3, most_bytes=1000)
    for number in range(5):
        store.keep("t", f"r{number}", (), [str(number).encode()])
    assert store.history("t", "r2") == (b"2",)
    for name in ("r0", "r1"):
        with pytest.raises(InvalidRequest):
            store.history("t", name)
    store.keep("t", "large", (), [b"x" * 2000])
    for name in ("r2", "r3", "r4", "large"):
        with pytest.raises(InvalidRequest):
            store.history("t", name)


async def test_a_format_and_a_choice_are_enforced(there: Clients, dispatcher: FakeDispatcher) -> None:
    form = {"format": {"type": "json_schema", "name": "a", "schema": LOOK, "strict": True}}
    client: Any = there.openai
    for fields in ({"text": form}, {"tools": TOOLS, "tool_choice": "required"},
                   {"tools": TOOLS, "tool_choice": {"type": "function", "name": "wait"}}):  # fmt: skip
        await client.responses.create(model="bytes", input="a", max_output_tokens=9, **fields)
        assert dispatcher.requests[-1].sampling.grammar is not None


async def test_an_error_after_the_first_event_is_an_event(there: Clients, dispatcher: FakeDispatcher) -> None:
    def script(request: Request) -> bytes:
        raise RuntimeError("worn out")

    dispatcher.script = script
    kinds = [event.type async for event in await there.openai.responses.create(model="bytes", input="a", stream=True)]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": 3}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "no", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": "x", "nonsense": 1}]}, "input[0].nonsense"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice.name"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "x"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "reasoning", "content": -1}]}, "input[0].content"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "schema": {"a": "x" * 70000}}}}, "text.format.schema"),
        ({"metadata": {str(number): "a" for number in range(20_000)}}, "metadata"),
        ({"nonsense": 1}, "nonsense"),
        ({"conversation": "c"}, "conversation"),
    ],
)
async def test_wrong_fields_are_named(
    there: Clients, dispatcher: FakeDispatcher, fields: dict[str, Any], field: str
) -> None:
    answer = await there.http.post("/v1/responses", json={"input": "hi"} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field, answer.text
    assert not dispatcher.requests


async def test_half_a_surrogate_pair_is_refused_where_the_response_would_repeat_it(there: Clients) -> None:
    for fields, field in (
        ({"instructions": "\ud800"}, "instructions"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"input": [{"role": "user", "content": "x", "\ud800": 1}]}, "input[0].?"),
    ):
        body = json.dumps({"input": "hi"} | fields)
        answer = await there.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_large_bodies_and_long_conversations_are_read_in_the_same_way(
    there: Clients, dispatcher: FakeDispatcher
) -> None:
    """In another process; a body and a history of less than 4 KiB are not."""
    client: Any = there.openai.responses
    more = {"max_output_tokens": 3}
    metadata: dict[str, Any] = {"a": "u" * 3000}
    first = await client.create(model="bytes", input="x" * 2000, metadata=metadata, **more)
    second = await client.create(
        model="bytes", input="y" * 1000, metadata=metadata, previous_response_id=first.id, **more
    )
    by_large_body = dispatcher.requests[-1].prompt
    assert b"x" * 2000 in bytes(by_large_body) and b"y" * 1000 in bytes(by_large_body)
    await client.create(model="bytes", input="y" * 1000, previous_response_id=first.id, **more)
    assert dispatcher.requests[-1].prompt == by_large_body
    padding = [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 40}] * 2  # of over 4 KiB
    third = await client.create(model="bytes", input=padding, **more)
    await client.create(model="bytes", input="z", previous_response_id=third.id, **more)
    answer = "".join(part.text for item in third.output if item.type == "message" for part in item.content)
    whole: list[Any] = [*padding, {"role": "assistant", "content": answer}, {"role": "user", "content": "z"}]
    by_long_history = dispatcher.requests[-1].prompt
    await client.create(model="bytes", input=whole, **more)
    assert answer and dispatcher.requests[-1].prompt == by_long_history
    with pytest.raises(openai.BadRequestError, match="input\\[0\\]"):
        await client.create(model="bytes", input=[{"role": "x"}], previous_response_id=third.id, **more)
    assert second.previous_response_id == first.id
