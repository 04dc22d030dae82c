"""Answers that begin with their prompt, and what each of its tokens was worth: by that harnesses score texts."""

from typing import Any

import pytest

from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients

TEXT = "the sea"
TOKENS = list(TEXT.encode())  # of the tests' tokenizer
ASK = {"model": "", "prompt": TEXT, "max_tokens": 5}
OF_PROMPT = [None, *(-token / 256 for token in TOKENS[1:])]


async def choices(there: Clients, **change: Any) -> list[dict[str, Any]]:
    answer = await there.http.post("/v1/completions", json=ASK | change)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


async def streamed(there: Clients, **change: Any) -> dict[int, dict[str, Any]]:
    """What the chunks of each choice come to."""
    joined: dict[int, dict[str, Any]] = {}
    asked: dict[str, Any] = ASK | change | {"stream": True}
    stream: Any = await there.openai.completions.create(**asked)
    async for chunk in stream:
        for choice in chunk.choices:
            whole = joined.setdefault(choice.index, {"text": "", "tokens": [], "token_logprobs": [], "ends": []})
            whole["text"] += choice.text
            if choice.logprobs is not None:
                whole["tokens"] += choice.logprobs.tokens or []
                whole["token_logprobs"] += choice.logprobs.token_logprobs or []
            if choice.finish_reason:
                whole["ends"].append(choice.finish_reason)
    return joined


async def test_an_echoed_answer_begins_with_its_prompt(there: Clients) -> None:
    [plain] = await choices(there, seed=1)
    [echoed] = await choices(there, seed=1, echo=True)
    assert echoed == plain | {"text": TEXT + plain["text"]}
    assert (await streamed(there, seed=1, extra_body={"echo": True}))[0]["text"] == TEXT + plain["text"]


async def test_each_answer_echoes_its_own_prompt(there: Clients) -> None:
    prompts = ["one", "twofold"]
    plain = await choices(there, prompt=prompts, n=2, seed=1)
    received = await choices(there, prompt=prompts, n=2, seed=1, echo=True)
    begun = [prompts[0], prompts[0], prompts[1], prompts[1]]
    assert [each["text"] for each in received] == [a + b["text"] for a, b in zip(begun, plain, strict=True)]
    joined = await streamed(there, prompt=prompts, n=2, seed=1, extra_body={"echo": True})
    assert [joined[place]["text"] for place in range(4)] == [each["text"] for each in received]
    assert all(len(joined[place]["ends"]) == 1 for place in range(4))


async def test_token_ids_are_echoed_as_text(there: Clients) -> None:
    [received] = await choices(there, prompt=TOKENS, echo=True)
    assert received["text"].startswith(TEXT)


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs_has_those_of_the_prompt(there: Clients, dispatcher: FakeDispatcher, n: int) -> None:
    for choice in await choices(there, echo=True, logprobs=2, n=n):
        received = choice["logprobs"]
        assert received["tokens"][: len(TOKENS)] == list(TEXT) and len(received["tokens"]) == len(TOKENS) + 5
        assert received["token_logprobs"][: len(TOKENS)] == OF_PROMPT
        assert all(each is not None for each in received["token_logprobs"][1:])
        assert received["top_logprobs"][0] is None and len(received["top_logprobs"]) == len(received["tokens"])
        assert received["text_offset"] == list(range(len(TOKENS) + 5))
    assert dispatcher.requests[0].sampling.prompt_logprobs == 2


async def test_echoed_chunks_join_to_the_whole_answer(there: Clients) -> None:
    [whole] = await choices(there, echo=True, logprobs=1, seed=1)
    joined = (await streamed(there, logprobs=1, seed=1, extra_body={"echo": True}))[0]
    for name in ("tokens", "token_logprobs"):
        assert joined[name] == whole["logprobs"][name]


async def test_best_of_echoes_the_prompt(there: Clients) -> None:
    for choice in await choices(there, echo=True, logprobs=0, n=2, best_of=3):
        assert choice["text"].startswith(TEXT) and choice["logprobs"]["token_logprobs"][: len(TOKENS)] == OF_PROMPT


async def test_streaming_several_answers_with_prompt_logprobs_is_refused(there: Clients) -> None:
    asked = ASK | {"echo": True, "stream": True, "n": 2, "logprobs": 1}
    answer = await there.http.post("/v1/completions", json=asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"


@pytest.mark.parametrize("change", [{"prompt": ""}, {"prompt": [99999]}, {"model": "other"}, {"prompt": "x" * 9000}])
async def test_echo_has_the_same_errors(there: Clients, change: dict[str, Any]) -> None:
    with_echo = await there.http.post("/v1/completions", json=ASK | {"echo": True} | change)
    without = await there.http.post("/v1/completions", json=ASK | change)
    assert with_echo.status_code == without.status_code >= 400
    assert with_echo.json() == without.json()


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_max_tokens_0_returns_prompt_logprobs_only(there: Clients, n: int) -> None:
    asked = ASK | {"echo": True, "max_tokens": 0, "logprobs": 1, "n": n}
    received = (await there.http.post("/v1/completions", json=asked)).json()
    assert len(received["choices"]) == n
    for choice in received["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        assert choice["logprobs"]["tokens"] == list(TEXT)
        assert choice["logprobs"]["token_logprobs"] == OF_PROMPT
        assert choice["logprobs"]["text_offset"] == list(range(len(TOKENS)))
    counts = received["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (len(TOKENS), 0)


async def test_prompt_logprobs_are_the_same_streamed_and_for_several_prompts(there: Clients) -> None:
    whole = await choices(there, prompt=["one", "twofold"], echo=True, max_tokens=0, logprobs=0)
    more = {"echo": True, "max_tokens": 0}
    joined = await streamed(there, prompt=["one", "twofold"], logprobs=0, extra_body=more)
    for place, choice in enumerate(whole):
        assert joined[place]["text"] == choice["text"] == ["one", "twofold"][place]
        assert joined[place]["token_logprobs"] == choice["logprobs"]["token_logprobs"]
        assert joined[place]["ends"] == ["length"]


async def test_prompt_logprobs_of_a_large_body_are_the_same(there: Clients) -> None:
    text = "sea " * 1020  # its body is read beside the event loop
    [choice] = await choices(there, prompt=text, echo=True, max_tokens=0, logprobs=0)
    assert choice["text"] == text and len(choice["logprobs"]["tokens"]) == len(text)


async def test_echo_with_max_tokens_0_works_without_logprobs(there: Clients) -> None:
    [choice] = await choices(there, echo=True, max_tokens=0)
    assert (choice["text"], choice["logprobs"]) == (TEXT, None)
    assert (await streamed(there, extra_body={"echo": True, "max_tokens": 0}))[0]["text"] == TEXT
