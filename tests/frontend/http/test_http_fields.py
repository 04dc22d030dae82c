"""Every field of a generation reaches the dispatcher, at both paths."""

import json

import pytest

from cluster.frontend.http.bodies import SCALARS, CompletionBody
from cluster.frontend.http.chat_body import ChatBody
from cluster.frontend.http.structured import ANY_OBJECT
from tests.frontend.grpc.fake import FakeDispatcher, renewed
from tests.frontend.http.opened import Clients
from workers.request import Grammar

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON: dict[str, object] = {"grammar": Grammar("json", json.dumps(SCHEMA))}
# What is sent, and what of `SamplingParams` it must be there.
BOTH: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}),  # off, to many clients
    ({"min_p": 0.25}, {"min_p": 0.25}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ({"seed": -2}, {"seed": 2**64 - 2}),  # its 64 bits
    ({"seed": -(2**63)}, {"seed": 2**63}),
    ({"stop": "END"}, {"stop": ("END",)}),
    ({"stop": ["END", "FIN"]}, {"stop": ("END", "FIN")}),
    ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"max_tokens": 9}, {"max_tokens": 9}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"logit_bias": {"5": -100, "3": 1.5}}, {"logit_bias": ((3, 1.5), (5, -100.0))}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"include_stop_str_in_output": True}, {"include_stop_in_output": True}),
    ({"response_format": {"type": "text"}}, {"grammar": None}),
    ({"response_format": {"type": "json_object"}}, {"grammar": ANY_OBJECT}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, JSON),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA)}, JSON),
    ({"guided_regex": "a+"}, {"grammar": Grammar("regex", "a+")}),
    ({"guided_choice": ["a", "b"]}, {"grammar": Grammar("choice", '["a", "b"]')}),
    ({"guided_grammar": "start: A"}, {"grammar": Grammar("grammar", "start: A")}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, JSON),
    ({"structured_outputs": {"regex": "a+"}}, {"grammar": Grammar("regex", "a+")}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"grammar": Grammar("choice", '["a", "b"]')}),
    ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": Grammar("grammar", "start: A")}),
    ({"structured_outputs": {"json_object": True}}, {"grammar": ANY_OBJECT}),
    ({"structured_outputs": {}}, {"grammar": None}),
]
COMPLETIONS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"logprobs": 0}, {"logprobs": 0}),
    ({"logprobs": 5}, {"logprobs": 5}),
]
CHATS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
    ({"max_completion_tokens": 9}, {"max_tokens": 9}),
    ({"max_completion_tokens": 9, "max_tokens": 5}, {"max_tokens": 9}),
]
ASKED: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
# Tested elsewhere, or no sampling.
OTHERS = {
    *("model", "stream", "stream_options", "prompt", "messages", "tools", "tool_choice"),
    *("parallel_tool_calls", "reasoning_effort"),
    "chat_template_kwargs",
    *("n", "best_of", "add_special_tokens", "echo"),
}


@pytest.fixture
def dispatcher(shared: tuple[FakeDispatcher, Clients]) -> FakeDispatcher:
    return renewed(shared[0])


@pytest.fixture
def there(shared: tuple[FakeDispatcher, Clients], dispatcher: FakeDispatcher) -> Clients:
    return shared[1]


@pytest.mark.parametrize(
    ("path", "sent", "expected"),
    [
        *(("/v1/completions", *each) for each in (*BOTH, *COMPLETIONS)),
        *(("/v1/chat/completions", *each) for each in (*BOTH, *CHATS)),
    ],
)
async def test_a_field_reaches_the_dispatcher(
    there: Clients,
    dispatcher: FakeDispatcher,
    path: str,
    sent: dict[str, object],
    expected: dict[str, object],
) -> None:
    answer = await there.http.post(path, json=ASKED[path] | sent)
    assert answer.status_code == 200, answer.text
    (request,) = dispatcher.requests
    assert {name: getattr(request.sampling, name) for name in expected} == expected


@pytest.mark.parametrize("path", ASKED)
async def test_seed_minus_one_is_random(there: Clients, dispatcher: FakeDispatcher, path: str) -> None:
    for _ in range(2):
        answer = await there.http.post(path, json=ASKED[path] | {"seed": -1})
        assert answer.status_code == 200, answer.text
    first, second = (request.sampling.seed for request in dispatcher.requests)
    assert first != second


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("sent", "answers", "made"), [({"n": 3}, 3, 3), ({"n": 2, "best_of": 4}, 2, 4)])
async def test_several_answers_become_several_requests(
    there: Clients, dispatcher: FakeDispatcher, path: str, sent: dict[str, int], answers: int, made: int
) -> None:
    received = await there.http.post(path, json=ASKED[path] | sent | {"max_tokens": 2})
    assert (len(received.json()["choices"]), len(dispatcher.requests)) == (answers, made)


async def test_every_field_has_a_test() -> None:
    tested = {name for sent, _ in (*BOTH, *COMPLETIONS, *CHATS) for name in sent}
    assert {*CompletionBody.model_fields, *ChatBody.model_fields} == tested | OTHERS
    assert set(SCALARS) <= tested | OTHERS


@pytest.mark.parametrize("path", ASKED)
async def test_usage_has_the_cached_tokens(there: Clients, path: str) -> None:
    answer = await there.http.post(path, json=ASKED[path])
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
