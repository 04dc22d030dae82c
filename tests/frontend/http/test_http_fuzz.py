"""Whatever is sent as a body, the server answers: never a 500, never nothing, and no request stays behind."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, opened
from tests.model.tiny import write_tiny_llama
from workers.model.tokenizer import ModelTokenizer

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
)
FIELDS = (
    *("prompt", "messages", "tokens", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "best_of", "logprobs", "top_logprobs", "tools"),
    *("logit_bias", "echo", "suffix", "user", "ignore_eos", "min_tokens", "stop_token_ids", "response_format"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "tool_choice", "something"),
    *("input", "instructions", "text", "reasoning", "metadata", "system", "thinking", "output_config"),
    *("add_special_tokens", "chat_template_kwargs", "function_call", "prompt_logprobs", "bad_words"),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, -(2**63), 2**64])
    | st.text(max_size=8)
    | st.sampled_from(["", "bytes", "\ud800", "user", "text", "1e999"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["role", "content", "type", "text", "1"]), inner)
    ),
    max_leaves=12,
)
calls = st.fixed_dictionaries({"id": scalars, "type": st.just("function"), "function": values})
words = st.text(min_size=1, max_size=8) | st.sampled_from(["user", "assistant", "\ud800", "{{ 1 }}"])
messages = st.lists(
    st.fixed_dictionaries(
        {"role": words | scalars, "content": words | values},
        optional={"tool_calls": values | st.lists(calls, max_size=2), "tool_call_id": scalars},
    ),
    min_size=1,
    max_size=3,
)
items = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | scalars},
        optional={name: values for name in ("role", "content", "call_id", "name", "arguments", "output", "summary")},
    ),
    max_size=3,
)
sane: dict[str, st.SearchStrategy[Any]] = {
    "prompt": words | st.text(max_size=20) | st.lists(st.integers(0, 255), max_size=5) | st.lists(st.text(max_size=4)),
    "messages": messages,
    "input": st.text(max_size=8) | items,
    "tokens": st.lists(st.integers(-1, 300), max_size=5),
    "max_tokens": st.integers(0, 8),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "n": st.integers(0, 3),
    "best_of": st.none() | st.integers(0, 4),
    "logprobs": st.none() | st.booleans() | st.integers(0, 21),
    "temperature": st.floats(-1, 3),
    "tools": st.lists(
        st.dictionaries(words, values, max_size=2)
        | st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries({"name": st.sampled_from("ab"), "parameters": values}),
            }
        ),
        max_size=2,
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "a"}}]),
    "parallel_tool_calls": st.booleans(),
    "stop": words | st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-101, 101), max_size=3),
}
bodies = st.fixed_dictionaries({}, optional=sane) | st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)
letters = st.text("abc ", min_size=1, max_size=8)
right = st.fixed_dictionaries(  # all of it can be answered, but for what is changed in it
    {
        "prompt": letters | st.lists(letters, min_size=1, max_size=3),
        "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": letters}), min_size=1),
        "tokens": st.lists(st.integers(0, 255), max_size=5),
        "max_tokens": st.integers(1, 8),
    },
    optional={
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "logprobs": st.booleans(),
        "temperature": st.floats(0, 3),
        "stop": letters,
        "seed": st.integers(0, 9),
    },
)
one_wild = st.dictionaries(st.sampled_from(FIELDS), values, max_size=1)
wild = st.tuples(st.fixed_dictionaries({}, optional=sane), bodies)
mixed = (st.tuples(right, one_wild) | wild).map(lambda pair: pair[0] | pair[1])


class Fuzzed:
    """One server for all examples."""

    def __init__(self, runner: asyncio.Runner, there: Clients, dispatcher: FakeDispatcher) -> None:
        self._runner = runner
        self._there = there
        self._dispatcher = dispatcher

    def post(self, path: str, body: bytes) -> None:
        self._runner.run(self._post(path, body))

    async def _post(self, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        async with asyncio.timeout(10):
            answer = await self._there.http.post(path, content=body, headers=headers)
        assert answer.status_code < 500 and answer.status_code not in (404, 405), (answer.status_code, answer.text)
        if answer.status_code != 200 or answer.headers["content-type"].startswith("application/json"):
            received = answer.json()
            assert (answer.status_code == 200) != (received.get("error") is not None)
        else:
            end = "data: [DONE]\n\n" if path.endswith("completions") else "\n\n"
            assert answer.text.endswith(end) and "event: error" not in answer.text
        assert not self._dispatcher.running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("fuzz") / "tiny")
    with asyncio.Runner() as runner:
        dispatcher, stack = FakeDispatcher(), AsyncExitStack()
        parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        there, _ = runner.run(stack.enter_async_context(opened(dispatcher, partial(ModelTokenizer, folder), **parsers)))
        yield Fuzzed(runner, there, dispatcher)
        runner.run(stack.aclose())


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(path=st.sampled_from(PATHS), body=mixed)
def test_any_object_is_answered_or_refused(server: Fuzzed, path: str, body: dict[str, object]) -> None:
    names = {name: value for name, value in body.items() if name != "model" or value in (None, "", "bytes")}
    if path == "/tokenize":
        names.pop("messages" if "stream" in names else "prompt", None)  # it takes one of the two
    server.post(path, encoded(names))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=64) | values.map(encoded))
def test_any_bytes_are_answered_or_refused(server: Fuzzed, path: str, body: bytes) -> None:
    server.post(path, body)
