"""Several answers to one request: told apart, begun and ended together, ranked when more are made than given."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from cluster.events import Accepted, AttemptsExhausted, Completed
from cluster.frontend.grpc import services
from cluster.frontend.parallel_sampling import answer_seed
from cluster.frontend.text import TextDelta
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from tests.frontend.grpc.conftest import OpenClient
from tests.frontend.grpc.fake import REPORT, FakeDispatcher
from tests.frontend.grpc.test_generate import deltas_of, until
from workers.request import FinishReason, Grammar, Request


def index_of(request: Request) -> int:
    return int(request.id.rpartition("#")[2])


def by_index(request: Request) -> bytes:
    """Answer 0 is 'aaaa', answer 1 'bbbb', ...: the first is the likeliest."""
    return bytes([ord("a") + index_of(request)] * 4)


async def refusal(client: AsyncClient, **options: Any) -> DiptychError:
    with pytest.raises(DiptychError) as caught:
        await client.complete("hello", **options)
    return caught.value


async def test_each_answer_is_a_request_with_its_own_seed(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = by_index
    answer = await client.complete("hello", request_id="r", n=3, seed=11, temperature=0.5)
    assert [output.text for output in answer.outputs] == ["aaaa", "bbbb", "cccc"]
    assert answer.text == "aaaa" and answer.accepted.request_id == "r"
    requests = sorted(dispatcher.requests, key=lambda request: request.id)
    assert [request.id for request in requests] == ["r#0", "r#1", "r#2"]
    assert [request.sampling.seed for request in requests] == [11, answer_seed(11, 1), answer_seed(11, 2)]
    assert {request.group for request in requests} == {"r"}
    assert all((request.sampling.n, request.sampling.temperature) == (1, 0.5) for request in requests)


async def test_one_answer_is_the_request_itself(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    answer = await client.complete("hello", request_id="r", seed=11, max_tokens=3, n=1)
    (request,) = dispatcher.requests
    assert (request.id, request.group, request.sampling.seed) == ("r", "", 11)
    assert answer.completed.answers == () and len(answer.outputs) == 1


def test_seeds_of_answers_differ_and_stay_in_range() -> None:
    seeds = {answer_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(64)}
    assert len(seeds) == 3 * 64 and all(0 <= seed < 2**64 for seed in seeds)


async def test_usage_counts_the_prompt_once_and_all_answers(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = lambda request: b"x" * (index_of(request) + 2)
    completed = (await client.complete("hello", n=3)).completed
    assert (completed.prompt_tokens, completed.completion_tokens, completed.cached_tokens) == (5, 2 + 3 + 4, 16)
    assert [each.completion_tokens for each in completed.answers] == [2, 3, 4]
    assert [each.finish for each in completed.answers] == [FinishReason.LENGTH] * 3
    assert completed.transfers == (REPORT,) * 3 and completed.attempts == 1
    completed.ledger.check()
    for each in completed.answers:
        each.ledger.check()
        assert each.ledger.total_ns <= completed.ledger.total_ns and each.mean_logprob is None


async def test_deltas_of_answers_interleave_without_gaps(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = lambda request: bytes([ord("a") + index_of(request)] * 30)
    dispatcher.step_s = 0.001
    events = [event async for event in client.generate("hello", request_id="r", n=4)]
    accepted = [event for event in events if isinstance(event, Accepted)]
    assert sorted(event.index for event in accepted) == [0, 1, 2, 3]
    assert {event.request_id for event in accepted} == {"r"}
    indices = [delta.index for delta in deltas_of(events)]
    assert indices != sorted(indices), "the answers came one after another"
    for index in range(4):
        mine = [delta for delta in deltas_of(events) if delta.index == index]
        assert "".join(delta.text for delta in mine) == chr(ord("a") + index) * 30
        assert [delta.first_position for delta in mine] == [
            sum(len(before.tokens) for before in mine[:place]) for place in range(len(mine))
        ]
    assert isinstance(events[-1], Completed) and len([e for e in events if isinstance(e, Completed)]) == 1


async def test_whole_answers_equal_streamed_answers(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = by_index
    events = [event async for event in client.generate("hello", n=3, logprobs=1, prompt_logprobs=0)]
    answer = await client.complete("hello", n=3, logprobs=1, prompt_logprobs=0)
    assert list(answer.outputs) == TextDelta.join_each(deltas_of(events))


async def test_a_stop_string_ends_one_answer_and_the_others_continue(
    client: AsyncClient, dispatcher: FakeDispatcher
) -> None:
    dispatcher.script = lambda request: b"one END two" if index_of(request) == 1 else b"one two three"
    answer = await client.complete("hello", n=3, stop=["END"])
    assert [output.text for output in answer.outputs] == ["one two three", "one ", "one two three"]
    finishes = [each.finish for each in answer.completed.answers]
    assert finishes == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]


async def test_best_of_returns_the_answers_with_the_highest_mean_logprob(
    client: AsyncClient, dispatcher: FakeDispatcher
) -> None:
    texts = [b"zzzz", b"mm", b"aaaaaaaa", b"nnnn"]
    dispatcher.script = lambda request: texts[index_of(request)]
    answer = await client.complete("hello", request_id="r", n=2, best_of=4)
    assert [output.text for output in answer.outputs] == ["aaaaaaaa", "mm"]
    assert [output.index for output in answer.outputs] == [0, 1]
    means = [each.mean_logprob for each in answer.completed.answers]
    assert means == [pytest.approx(-ord("a") / 256), pytest.approx(-ord("m") / 256)]
    assert all(output.logprobs == () for output in answer.outputs), "nobody asked for log probabilities"
    assert answer.completed.completion_tokens == 4 + 2 + 8 + 4
    assert (answer.completed.prompt_tokens, answer.accepted.request_id) == (5, "r")


async def test_best_of_returns_the_requested_logprobs(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    texts = [b"zz", b"mm", b"aa"]
    dispatcher.script = lambda request: texts[index_of(request)]
    answer = await client.complete([1, 2, 3], n=1, best_of=3, logprobs=2, prompt_logprobs=0)
    assert answer.text == "aa" and len(answer.output.logprobs) == 2 and len(answer.output.logprobs[0].top) == 2
    assert [each.chosen for each in answer.output.prompt_logprobs] == [-2 / 256, -3 / 256]


async def test_best_of_above_n_cannot_stream(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    with pytest.raises(DiptychError, match="the best are known at the end") as caught:
        await anext(client.generate("hello", n=1, best_of=2))
    assert caught.value.field == "sampling.best_of" and not dispatcher.requests


async def test_prompt_logprobs_come_once_with_the_first_delta(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    events = [event async for event in client.generate([5, 6, 7], n=2, max_tokens=4, prompt_logprobs=0)]
    received = [delta for delta in deltas_of(events) if delta.prompt_logprobs]
    assert [(delta.index, delta.first_position) for delta in received] == [(0, 0)]
    assert [each.chosen for each in received[0].prompt_logprobs] == [-6 / 256, -7 / 256]


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"n": 0}, "sampling.n", "between 1 and 64"),
        ({"n": 65}, "sampling.n", "between 1 and 64"),
        ({"n": 4, "best_of": 3}, "sampling.best_of", "between n (4) and 64"),
        ({"logit_bias": {256: 1.0}}, "sampling.logit_bias[0]", "256"),
        ({"logit_bias": {7: 101.0}}, "sampling.logit_bias", "between -100 and 100"),
        ({"logit_bias": {token: 1.0 for token in range(1025)}}, "sampling.logit_bias", "1025 entries"),
        ({"presence_penalty": 2.5}, "sampling.presence_penalty", "between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "sampling.frequency_penalty", "between -2 and 2"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs", "between 0 and 20"),
        ({"request_id": "mine#1"}, "request_id", "'#'"),
    ],
)
async def test_invalid_numbers_of_answers_are_refused_before_anything_runs(
    client: AsyncClient, dispatcher: FakeDispatcher, options: dict[str, Any], field: str, words: str
) -> None:
    error = await refusal(client, **options)
    assert (error.code, error.field) == ("INVALID_ARGUMENT", field) and words in str(error)
    assert not dispatcher.requests


async def test_more_answers_than_can_ever_run_are_refused(open_client: OpenClient, dispatcher: FakeDispatcher) -> None:
    error = await refusal(await open_client(max_requests=5), n=6)
    assert (error.code, error.field) == ("INVALID_ARGUMENT", "sampling.n") and "at most 5 answers" in str(error)
    error = await refusal(await open_client(max_running=4), n=2, best_of=5)
    assert (error.code, error.field) == ("INVALID_ARGUMENT", "sampling.best_of") and "at most 4 answers" in str(error)
    assert not dispatcher.requests


async def test_each_answer_counts_as_a_request_in_flight(open_client: OpenClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    client = await open_client(max_requests=5)
    async with aclosing(client.generate("hello", n=4)) as events:
        await anext(events)
        assert (await client.status()).active_requests == 4
        assert (await refusal(client, n=2)).code == "RESOURCE_EXHAUSTED"
        dispatcher.hold.set()
        assert (await client.complete("hello", max_tokens=1)).text == "a"


async def test_cancel_ends_all_answers(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.01
    events = client.generate("hello", request_id="mine", n=3, max_tokens=4000)
    await anext(events)
    await until(lambda: len(dispatcher.running) == 3)
    assert await client.cancel("mine")
    await until(lambda: not dispatcher.running)
    with pytest.raises(DiptychError) as caught:
        async for _ in events:
            pass
    assert caught.value.code == "CANCELLED"


async def test_a_disconnected_client_ends_all_answers(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.01
    async with aclosing(client.generate("hello", n=3, max_tokens=4000)) as events:
        await anext(events)
        await until(lambda: len(dispatcher.running) == 3)
    await until(lambda: not dispatcher.running)


async def test_a_passed_deadline_ends_all_answers(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.05
    assert (await refusal(client, n=3, max_tokens=4000, timeout_s=0.3)).code == "DEADLINE_EXCEEDED"
    await until(lambda: not dispatcher.running)


async def test_one_answer_that_fails_fails_the_request(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    def fails(request: Request) -> bytes:
        if index_of(request) == 1:
            raise AttemptsExhausted("6 attempts failed")
        return b"x" * 4000

    dispatcher.script, dispatcher.step_s = fails, 0.01
    error = await refusal(client, n=3, max_tokens=4000)
    assert (error.code, error.reason) == ("UNAVAILABLE", "ATTEMPTS_SPENT")
    await until(lambda: not dispatcher.running)


async def test_a_batch_of_many_answers_fits_the_gateway(client: AsyncClient) -> None:
    results = {index: result async for index, result in client.batch(["a"] * 30, n=40, max_tokens=2)}
    assert len(results) == 30
    assert all(not isinstance(each, DiptychError) and len(each.outputs) == 40 for each in results.values())


async def test_a_slow_client_gets_joined_deltas_per_answer(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = lambda request: bytes([ord("a") + index_of(request)] * 2000)
    events = client.generate("hello", n=3, max_tokens=2000, logprobs=20)
    got = [await anext(events)]
    await until(lambda: not dispatcher.running, within_s=20.0)
    got += [event async for event in events]
    assert len(deltas_of(got)) < 3000
    assert [len(delta.tokens) for delta in TextDelta.join_each(deltas_of(got))] == [2000] * 3
    assert all(len({*delta.text}) == 1 for delta in deltas_of(got) if delta.text)


async def test_an_output_too_large_for_one_message_is_refused_with_advice(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MAX_MESSAGE_BYTES", 1 << 20)
    error = await refusal(client, n=8, max_tokens=1000, logprobs=20)
    assert (error.code, error.field) == ("INVALID_ARGUMENT", "response_mode")
    assert "more than one message can carry (1 MiB); ask for RESPONSE_MODE_DELTAS" in str(error)


async def test_tools_reach_the_template(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    async for _ in client.chat([("user", "Hi")], tools=[{"name": "weather"}, {"name": "time"}], max_tokens=1):
        pass
    assert bytes(dispatcher.requests[0].prompt) == b"[weather][time]<user>Hi\n"
    with pytest.raises(DiptychError, match="not JSON serializable"):
        client.chat([("user", "Hi")], tools=[{"name": object()}])


@pytest.mark.parametrize("depth", [500, 100_000])
async def test_a_tool_that_is_nested_too_deep_is_invalid_and_logs_nothing(
    client: AsyncClient, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr("json.dumps", lambda tool: deep)
        events = client.chat([("user", "Hi")], tools=[{}], max_tokens=1)
        with pytest.raises(DiptychError, match="more than 64 levels deep") as failure:
            _ = [event async for event in events]
    assert (failure.value.code, failure.value.field) == ("INVALID_ARGUMENT", "prompt.chat.tools[0]")
    assert not caplog.records


async def test_every_further_sampling_field_reaches_the_dispatcher(
    client: AsyncClient, dispatcher: FakeDispatcher
) -> None:
    await client.complete(
        "hello",
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={9: 1.5, 3: -100},
        prompt_logprobs=4,
        include_stop_in_output=True,
        skip_special_tokens=False,
        max_tokens=1,
    )
    sampling = dispatcher.requests[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert sampling.logit_bias == ((3, -100.0), (9, 1.5))
    assert (sampling.prompt_logprobs, sampling.include_stop_in_output, sampling.skip_special_tokens) == (4, True, False)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"json_schema": {"type": "object"}}, Grammar("json", '{"type": "object"}')),
        ({"json_schema": '{"type": "object"}'}, Grammar("json", '{"type": "object"}')),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"lark": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
    ],
)
async def test_a_grammar_reaches_the_dispatcher(
    client: AsyncClient, dispatcher: FakeDispatcher, option: dict[str, Any], expected: Grammar
) -> None:
    await client.complete("hello", max_tokens=1, **option)
    assert dispatcher.requests[0].sampling.grammar == expected


async def test_a_request_has_one_grammar(client: AsyncClient) -> None:
    with pytest.raises(DiptychError, match="an answer has one grammar, and regex is given"):
        await client.complete("hello", max_tokens=1, regex="a", choice=["a"])
