"""The real SDK against real workers: text, counts and ends are those of gRPC, and nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError, NotFoundError
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk

from cluster.frontend.servers import Servers
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClusterSpec
from kvtransfer.open import SharedMemory
from tests.cluster.local import Cluster, split_spec
from tests.frontend.http.opened import Clients, clients
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import EngineConfig
from workers.model.tokenizer import ModelTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "The sea is"
ENGINE = EngineConfig(block_size=8, kv_blocks=96, max_batch_tokens=64, max_running=8, threads=1)


@dataclass
class Subject:
    there: Clients
    runtime: LocalRuntime
    model: str

    async def settle(self) -> None:
        await Cluster([], self.runtime, None).settle()  # type: ignore[arg-type]


def spec(model: str) -> ClusterSpec:
    made = split_spec()
    pools = tuple(replace(pool, engine=ENGINE) for pool in made.pools)
    gateway = replace(made.gateway, grpc_port=0, http_port=0, default_max_tokens=16)
    return replace(made, model=model, executor="torch", pools=pools, gateway=gateway)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    model = str(write_tiny_llama(tmp_path_factory.mktemp("http") / "tiny"))
    shared = SharedMemory()
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared))

    def server(context: object) -> Servers:
        return Servers(context, partial(ModelTokenizer, Path(model)))  # type: ignore[arg-type]

    serving = await serve(spec(model), runtime=runtime, make_server=server)
    try:
        async with clients(serving.http_urls[0], serving.endpoint) as there:
            await there.grpc.wait_ready(20.0)
            yield Subject(there, runtime, model)
    finally:
        await serving.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def settled(subject: Subject) -> AsyncIterator[None]:
    """After each test every block is free again."""
    yield
    await subject.settle()


async def test_a_greedy_completion_is_that_of_grpc(subject: Subject) -> None:
    expected = await subject.there.grpc.complete(PROMPT, max_tokens=12, temperature=0.0)
    received = await subject.there.openai.completions.create(
        model=subject.model, prompt=PROMPT, max_tokens=12, temperature=0.0
    )
    assert received.choices[0].text == expected.text
    assert received.usage is not None
    counts = received.usage.prompt_tokens, received.usage.completion_tokens, received.usage.total_tokens
    prompt, completion = expected.completed.prompt_tokens, expected.completed.completion_tokens
    assert counts == (prompt, completion, prompt + completion)
    assert received.choices[0].finish_reason == "length" and received.model == subject.model


async def test_token_ids_are_a_prompt(subject: Subject) -> None:
    tokens = list((await subject.there.http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"])
    by_text, by_ids = [
        await subject.there.openai.completions.create(model=subject.model, prompt=prompt, max_tokens=8, temperature=0.0)
        for prompt in (PROMPT, tokens)
    ]
    assert by_text.choices[0].text == by_ids.choices[0].text


async def test_a_stream_equals_the_whole_answer(subject: Subject) -> None:
    ask = {"model": subject.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
    whole: Completion = await subject.there.openai.completions.create(**ask)  # type: ignore[call-overload]
    stream = await subject.there.openai.completions.create(  # type: ignore[call-overload]
        **ask, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_every_chunk_can_have_usage_even_without_text(subject: Subject) -> None:
    completions: Any = subject.there.openai.completions  # its types know no continuous_usage_stats
    stream = await completions.create(
        model=subject.model,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    *chunks, end, usage = [chunk async for chunk in stream]
    received = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(received) == len(chunks) and received == sorted(received) and received[-1] == 12
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {usage.usage.prompt_tokens}
    assert (end.usage.completion_tokens, end.usage.prompt_tokens) == (12, usage.usage.prompt_tokens)
    assert (end.choices[0].finish_reason, usage.usage.completion_tokens) == ("length", 12)


async def test_a_greedy_chat_is_that_of_grpc_streamed_or_not(subject: Subject) -> None:
    expected = [event async for event in subject.there.grpc.chat([("user", "Hi")], max_tokens=10, temperature=0.0)]
    text = "".join(getattr(event, "text", "") for event in expected)
    ask = {"model": subject.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10, "temperature": 0}
    whole = await subject.there.openai.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == text and whole.choices[0].message.role == "assistant"
    stream = await subject.there.openai.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_parts_of_a_message_are_its_text(subject: Subject) -> None:
    contents = ("Hi there", [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}])
    answers = [
        await subject.there.openai.chat.completions.create(
            model=subject.model,
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
            max_completion_tokens=6,
            temperature=0.0,
        )
        for content in contents
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    counts = [(each.usage.prompt_tokens, each.usage.completion_tokens) for each in answers if each.usage is not None]
    assert counts[0] == counts[1] and counts[0][1] == 6


async def test_the_same_seed_gives_the_same_answers(subject: Subject) -> None:
    def texts(received: Completion) -> list[tuple[int, str]]:
        return [(choice.index, choice.text) for choice in received.choices]

    once, again, other = [
        await subject.there.openai.completions.create(
            model=subject.model,
            prompt=PROMPT,
            max_tokens=10,
            seed=seed,
            n=2,
            temperature=3.0,
            top_p=0.99,
            extra_body={"top_k": 200},
        )
        for seed in (7, 7, 8)
    ]
    assert texts(once) == texts(again) != texts(other)
    assert [index for index, _ in texts(once)] == [0, 1] and once.choices[0].text != once.choices[1].text
    assert once.usage is not None and once.usage.completion_tokens == 20


async def test_several_answers_stream_by_index(subject: Subject) -> None:
    ask = {"model": subject.model, "prompt": PROMPT, "max_tokens": 10, "temperature": 3.0, "seed": 7, "n": 2}
    whole: Completion = await subject.there.openai.completions.create(**ask)  # type: ignore[call-overload]
    texts = {0: "", 1: ""}
    ends = []
    async for chunk in await subject.there.openai.completions.create(**ask, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(ends) == [0, 1], "each ends once"


async def test_several_prompts_are_numbered_in_their_order(subject: Subject) -> None:
    async def answer(prompt: str | list[str]) -> list[CompletionChoice]:
        received = await subject.there.openai.completions.create(
            model=subject.model, prompt=prompt, max_tokens=8, temperature=0.0, n=2
        )
        return received.choices

    both = await answer(["The sea", "A hill"])
    alone = [*await answer("The sea"), *await answer("A hill")]
    assert [choice.text for choice in both] == [choice.text for choice in alone]
    assert [choice.index for choice in both] == [0, 1, 2, 3]


async def test_a_stop_string_ends_the_answer_before_it(subject: Subject) -> None:
    ask = {"model": subject.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.0}
    full: Completion = await subject.there.openai.completions.create(**ask)  # type: ignore[call-overload]
    stop = next(letter for letter in full.choices[0].text[4:] if letter != "\ufffd")
    for given in (stop, [stop, "never said"]):
        received: Completion = await subject.there.openai.completions.create(**ask, stop=given)  # type: ignore[call-overload]
        assert received.choices[0].text == full.choices[0].text.partition(stop)[0]
        assert received.choices[0].finish_reason == "stop"


async def test_log_probabilities_of_a_completion(subject: Subject) -> None:
    received = await subject.there.openai.completions.create(
        model=subject.model, prompt=PROMPT, max_tokens=5, temperature=0.0, logprobs=2
    )
    logprobs = received.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.tokens or ()) == len(logprobs.token_logprobs) == len(logprobs.text_offset or ()) == 5
    for chosen, best in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(best.values()) <= 0.0  # greedy


async def test_log_probabilities_of_a_chat_streamed_or_not(subject: Subject) -> None:
    ask = {
        "model": subject.model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = await subject.there.openai.chat.completions.create(**ask)  # type: ignore[call-overload]
    content = whole.choices[0].logprobs.content
    assert len(content) == 5 and all(len(each.top_logprobs) == 3 for each in content)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)
    stream = await subject.there.openai.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
    streamed = [
        each
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for each in choice.logprobs.content
    ]
    assert [each.logprob for each in streamed] == [each.logprob for each in content]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnected_client_leaves_nothing_behind(subject: Subject, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0.0, "ignore_eos": True, "stream": stream}
    steps = [worker.engine.stats().steps for worker in subject.runtime.workers.values()]

    async def ask() -> None:
        async with subject.there.http.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                return

    if stream:
        await ask()
    else:
        asking = asyncio.create_task(ask())
        while [worker.engine.stats().steps for worker in subject.runtime.workers.values()] == steps:
            await asyncio.sleep(0.005)
        asking.cancel()
    await subject.settle()
    assert (await subject.there.grpc.status()).active_requests == 0
    outcomes = (await subject.there.http.get("/metrics")).text
    assert 'outcome="cancelled"' in outcomes


async def test_what_is_too_long_is_refused_with_the_field(subject: Subject) -> None:
    with pytest.raises(BadRequestError) as long_prompt:
        await subject.there.openai.completions.create(model=subject.model, prompt="sea " * 400)
    assert long_prompt.value.param == "prompt"
    with pytest.raises(BadRequestError, match="maximum context length is 512 tokens") as long_answer:
        await subject.there.openai.completions.create(model=subject.model, prompt=PROMPT, max_tokens=4000)
    assert long_answer.value.param == "max_tokens"


async def test_the_model_is_listed_and_no_other_is_served(subject: Subject) -> None:
    listed = (await subject.there.openai.models.list()).data
    assert [each.id for each in listed] == [subject.model]
    assert (await subject.there.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 512
    assert (await subject.there.http.get(f"/v1/models/{subject.model}")).json()["id"] == subject.model
    with pytest.raises(NotFoundError) as caught:
        await subject.there.openai.completions.create(model="another", prompt=PROMPT)
    assert caught.value.code == "model_not_found" and caught.value.type == "invalid_request_error"


async def test_tokenize_and_detokenize_are_inverse(subject: Subject) -> None:
    received = (await subject.there.http.post("/tokenize", json={"prompt": "Grüße", "return_token_strs": True})).json()
    assert received["count"] == len(received["tokens"]) == len(received["token_strs"]) == len("Grüße".encode())
    assert received["max_model_len"] == 512
    back = await subject.there.http.post("/detokenize", json={"tokens": received["tokens"]})
    assert back.json() == {"prompt": "Grüße"}
    chat = [{"role": "user", "content": "Hi"}]
    counted = (await subject.there.http.post("/tokenize", json={"messages": chat})).json()["count"]
    answer = await subject.there.openai.chat.completions.create(model="", messages=chat, max_tokens=1)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.prompt_tokens == counted


async def test_an_echoed_answer_has_the_logprobs_of_its_generation(subject: Subject) -> None:
    ask = {"model": subject.model, "temperature": 0.0, "logprobs": 1}
    drawn: Completion = await subject.there.openai.completions.create(**ask, prompt=PROMPT, max_tokens=8)  # type: ignore[call-overload]
    made = drawn.choices[0].logprobs
    tokens = (await subject.there.http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    answer = await subject.there.grpc.complete(tokens, max_tokens=8, temperature=0.0)
    longer = [*tokens, *answer.output.tokens]
    scored: Completion = await subject.there.openai.completions.create(  # type: ignore[call-overload]
        **ask, prompt=longer, max_tokens=1, echo=True
    )
    received = scored.choices[0].logprobs
    assert (
        made is not None
        and received is not None
        and received.token_logprobs is not None
        and received.top_logprobs is not None
    )
    assert len(received.token_logprobs) == len(longer) + 1 and received.token_logprobs[0] is None
    assert received.token_logprobs[len(tokens) : -1] == pytest.approx(made.token_logprobs, abs=1e-3)
    behind = zip(received.tokens[len(tokens) : -1], received.top_logprobs[len(tokens) : -1], strict=True)
    assert all(list(best) == [token] for token, best in behind)  # greedy: each was the likeliest


async def test_a_prompt_has_the_same_logprobs_alone_and_with_an_answer(subject: Subject) -> None:
    ask: dict[str, Any] = {"model": subject.model, "prompt": PROMPT, "echo": True, "logprobs": 2, "temperature": 0}
    alone = await subject.there.openai.completions.create(**ask, max_tokens=0)
    before = await subject.there.openai.completions.create(**ask, max_tokens=1)
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    received, expected = alone.choices[0].logprobs, before.choices[0].logprobs
    assert alone.choices[0].text == PROMPT and received is not None and expected is not None
    assert received.tokens == (expected.tokens or [])[:-1]
    assert received.top_logprobs == (expected.top_logprobs or [])[:-1]
    assert received.token_logprobs == pytest.approx((expected.token_logprobs or [])[:-1])
