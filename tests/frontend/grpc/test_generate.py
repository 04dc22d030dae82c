"""Requests through the real server and client: order, positions, modes, stops, cancel, lag."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from cluster.events import Accepted, Completed, DeadlineExceeded, Rejected
from cluster.frontend.gateway import GenerateOptions, RequestCancelled
from cluster.frontend.text import TextDelta, TextEvent, TextPrompt, TokenPrompt
from diptych.client import Answer, AsyncClient
from diptych.errors import DiptychError
from tests.frontend.grpc.fake import LINK, REPORT, FakeDispatcher, gateway_context, gateway_without_servers
from tests.frontend.tokenizers import ByteTokenizer
from workers.request import SLO, FinishReason, Grammar, Request, SamplingParams


def deltas_of(events: list[TextEvent]) -> list[TextDelta]:
    return [event for event in events if isinstance(event, TextDelta)]


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait for a state of the fake that has no event."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_events_come_in_order_with_gapless_positions(client: AsyncClient) -> None:
    events = [event async for event in client.generate("hello", max_tokens=100)]
    assert isinstance(events[0], Accepted) and isinstance(events[-1], Completed)
    deltas = deltas_of(events)
    assert len(deltas) == len(events) - 2
    position = 0
    for delta in deltas:
        assert delta.first_position == position
        position += len(delta.tokens)
    assert position == 100
    assert "".join(delta.text for delta in deltas) == ("abcdefghijklmnopqrstuvwxyz" * 4)[:100]


async def test_completed_has_usage_ledger_and_handoff(client: AsyncClient) -> None:
    answer = await client.complete("hello", max_tokens=10)
    completed = answer.completed
    assert (completed.prompt_tokens, completed.completion_tokens, completed.cached_tokens) == (5, 10, 16)
    assert completed.finish is FinishReason.LENGTH
    assert completed.transfers == (REPORT,)
    completed.ledger.check()
    assert dict(completed.ledger.first).keys() == {"admission", "prefill_compute"}
    assert (answer.accepted.prefill_worker, answer.accepted.decode_worker) == ("prefill-0", "decode-0")
    assert (answer.accepted.predicted_ttft_s, answer.accepted.predicted_tpot_s) == (0.5, None)


async def test_whole_answer_equals_streamed_answer(client: AsyncClient) -> None:
    events = [event async for event in client.generate("hello", max_tokens=50, logprobs=2)]
    answer = await client.complete("hello", max_tokens=50, logprobs=2)
    assert answer.output == TextDelta.join(deltas_of(events))
    assert len(answer.output.logprobs) == 50
    assert answer.output.logprobs[0].chosen == -97 / 256
    assert answer.output.logprobs[0].top == ((0, -1.0), (1, -2.0))


async def test_every_sampling_field_arrives(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    slo = SLO(0.2, 0.05, "fast")
    await client.complete(
        [1, 2, 3],
        request_id="r1",
        session="s1",
        slo=slo,
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=2,
        stop=["x", "y"],
        stop_token_ids=[200],
        ignore_eos=True,
        logprobs=3,
    )
    request = dispatcher.requests[0]
    assert (request.id, request.prompt, request.session, request.slo) == ("r1", (1, 2, 3), "s1", slo)
    assert request.sampling == SamplingParams(0.7, 40, 0.9, 0.1, 1.1, 2**64 - 1, 9, 2, ("x", "y"), (200,), True, 3)


async def test_the_gateway_fills_in_missing_fields(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    for _ in range(2):
        await client.complete("hello")
    first, second = (request.sampling for request in dispatcher.requests)
    assert first.seed is not None and first.seed != second.seed
    assert first.max_tokens == 512
    assert first.temperature == 1.0
    assert dispatcher.requests[0].id != dispatcher.requests[1].id


async def test_chat_goes_through_the_template(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    async with aclosing(client.chat([("system", "Be kind."), ("user", "Hi")], max_tokens=3)) as events:
        assert len([event async for event in events]) >= 3
    assert bytes(dispatcher.requests[0].prompt) == b"<system>Be kind.\n<user>Hi\n"


async def test_a_stop_string_ends_the_answer_and_frees_everything(
    client: AsyncClient, dispatcher: FakeDispatcher
) -> None:
    answer = await client.complete("hello", max_tokens=1000, stop=["hij"])
    assert answer.text == "abcdefg"
    assert answer.completed.finish is FinishReason.STOP
    assert answer.completed.completion_tokens == 10 == len(answer.output.tokens)
    answer.completed.ledger.check()
    assert not dispatcher.running


async def test_tokens_after_the_stop_in_one_message_are_dropped(
    client: AsyncClient, dispatcher: FakeDispatcher
) -> None:
    dispatcher.chunk = 8
    answer = await client.complete("hello", max_tokens=16, stop=["lm"])
    assert answer.text == "abcdefghijk"
    assert (answer.completed.finish, answer.completed.completion_tokens) == (FinishReason.STOP, 13)


async def test_only_whole_characters_are_sent(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    text = "shells 🐚🐚 and ñandúes"
    dispatcher.script = lambda request: text.encode()
    events = [event async for event in client.generate("hello", max_tokens=100)]
    assert "".join(delta.text for delta in deltas_of(events)) == text
    assert all("�" not in delta.text for delta in deltas_of(events))


async def test_batch_answers_every_prompt_and_reports_the_bad_one(client: AsyncClient) -> None:
    prompts = ["a" * (index + 1) for index in range(100)]
    prompts[7] = ""
    results = {index: result async for index, result in client.batch(prompts, max_tokens=5)}
    assert results.keys() == set(range(100))
    bad = results.pop(7)
    assert isinstance(bad, DiptychError) and (bad.code, bad.field) == ("INVALID_ARGUMENT", "prompt.text")
    for index, result in results.items():
        assert isinstance(result, Answer)
        assert (result.text, result.completed.prompt_tokens) == ("abcde", index + 1)


async def test_cancel_by_id_ends_the_stream_and_the_request(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.01
    events = client.generate("hello", request_id="mine", max_tokens=4000)
    await anext(events)
    await anext(events)
    assert await client.cancel("mine")
    await until(lambda: not dispatcher.running)
    with pytest.raises(DiptychError) as caught:
        async for _ in events:
            pass
    assert caught.value.code == "CANCELLED"
    assert not await client.cancel("mine")


async def test_closing_the_iterator_cancels_the_request(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.01
    async with aclosing(client.generate("hello", max_tokens=4000)) as events:
        await anext(events)
        await anext(events)
        assert dispatcher.running
    await until(lambda: not dispatcher.running)


async def test_a_disconnected_client_cancels_its_requests(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    events = client.generate("hello", max_tokens=4000)
    await anext(events)
    await client.close()
    await until(lambda: not dispatcher.running)


async def test_leaving_a_batch_cancels_all_of_it(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    batch = asyncio.ensure_future(anext(client.batch(["a", "b", "c"], max_tokens=4000)))
    await until(lambda: len(dispatcher.running) == 3)
    batch.cancel()
    await until(lambda: not dispatcher.running)


async def test_a_slow_client_gets_joined_messages_and_delays_no_other(
    client: AsyncClient, dispatcher: FakeDispatcher
) -> None:
    dispatcher.script = lambda request: b"x" * 4000
    events = client.generate("hello", request_id="lag", max_tokens=4000, logprobs=20)
    got: list[TextEvent] = [await anext(events)]
    await until(lambda: not dispatcher.running, within_s=60.0)
    assert dispatcher.produced["lag"] == 4000
    got += [event async for event in events]
    deltas = deltas_of(got)
    assert sum(len(delta.tokens) for delta in deltas) == 4000
    assert len(deltas) < 2000
    assert max(len(delta.tokens) for delta in deltas) > 10
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in deltas)


async def test_64_concurrent_streams_get_their_own_tokens(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = lambda request: bytes(request.prompt) * 50
    answers = await asyncio.gather(
        *(client.complete(f"p{index:02}", request_id=f"r{index}", max_tokens=150) for index in range(64))
    )
    assert [answer.text for answer in answers] == [f"p{index:02}" * 50 for index in range(64)]
    assert [answer.accepted.request_id for answer in answers] == [f"r{index}" for index in range(64)]


async def test_status_shows_workers_links_and_load(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    events = client.generate("hello")
    await anext(events)
    status = await client.status()
    assert status.view == dispatcher.view
    assert status.view.links == (LINK,)
    assert (status.gateway, status.active_requests, status.max_requests) == ("gateway-0", 1, 256)
    await events.aclose()


async def test_long_prompts_are_encoded_outside_the_event_loop(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.view = replace(dispatcher.view, workers=())
    assert (await client.complete("a" * 8000, max_tokens=4)).completed.prompt_tokens == 8000


async def test_a_request_leaves_nothing_in_the_gateway(dispatcher: FakeDispatcher) -> None:
    gateway = gateway_without_servers(gateway_context(dispatcher), ByteTokenizer())
    async with aclosing(
        gateway.generate(TextPrompt("hello"), SamplingParams(), GenerateOptions(request_id="r"))
    ) as events:
        await anext(events)
        assert gateway.active == 1
    assert gateway.active == 0 and not dispatcher.running


async def test_a_request_may_be_cancelled_while_its_prompt_is_encoded(dispatcher: FakeDispatcher) -> None:
    go_on = threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            go_on.wait(5.0)
            return super().encode(text)

    gateway = gateway_without_servers(gateway_context(dispatcher), SlowTokenizer())
    first = asyncio.ensure_future(
        anext(gateway.generate(TextPrompt("x" * 4097), SamplingParams(), GenerateOptions(request_id="r")))
    )
    await until(lambda: gateway.active == 1)
    assert gateway.cancel("r")
    dispatcher.view = replace(dispatcher.view, workers=())
    go_on.set()
    with pytest.raises(RequestCancelled, match="was cancelled by its caller"):
        await first
    assert gateway.active == 0 and not dispatcher.requests


async def test_a_deadline_ends_a_request_whose_grammar_or_prompt_is_still_read(dispatcher: FakeDispatcher) -> None:
    go_on = threading.Event()

    class Slow(ByteTokenizer):
        def check_grammar(self, grammar: Grammar) -> Grammar:
            go_on.wait(30.0)
            return grammar

        def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            go_on.wait(30.0)
            return super().encode(text)

    gateway = gateway_without_servers(gateway_context(dispatcher), Slow())
    options = GenerateOptions(deadline_s=0.05)
    try:
        for prompt, sampling in (
            (TokenPrompt((1,)), SamplingParams(grammar=Grammar("regex", "a"))),
            (TextPrompt("x" * 4097), SamplingParams()),
        ):
            with pytest.raises(DeadlineExceeded, match="during admission"):
                await anext(gateway.generate(prompt, sampling, options))
            assert gateway.active == 0 and not go_on.is_set()
    finally:
        go_on.set()


async def test_requests_with_the_same_new_grammar_share_its_check(dispatcher: FakeDispatcher) -> None:
    """60 requests with one new schema took a check each, one after the other: a minute on a busy host."""
    go_on, checked = threading.Event(), list[Grammar]()

    class SlowCompiler(ByteTokenizer):
        def check_grammar(self, grammar: Grammar) -> Grammar:
            checked.append(grammar)
            go_on.wait(5.0)
            if len(checked) == 1:
                raise Rejected("the host is too busy", 1.0)
            return grammar

    gateway = gateway_without_servers(gateway_context(dispatcher), SlowCompiler())
    sampling = SamplingParams(max_tokens=1, grammar=Grammar("regex", "a"))

    def ask(name: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(
            anext(gateway.generate(TextPrompt("hi"), sampling, GenerateOptions(request_id=name)))
        )

    leaving, *staying = [ask(f"r{index}") for index in range(10)]
    await until(lambda: gateway.active == 10)
    leaving.cancel()
    await asyncio.wait([leaving])
    go_on.set()
    outcomes = await asyncio.gather(*staying, return_exceptions=True)
    assert len(checked) == 1 and all(isinstance(each, Rejected) for each in outcomes)
    assert isinstance(await ask("again"), Accepted) and len(checked) == 2, "a check that failed is repeated"
    assert isinstance(await ask("once-more"), Accepted) and len(checked) == 2


async def test_a_given_seed_is_used(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    def only(request: Request) -> bytes:
        assert request.sampling.seed == 0
        return b"ok"

    dispatcher.script = only
    assert (await client.complete("hello", seed=0)).text == "ok"


async def test_a_caller_cancelled_while_it_closes_frees_its_place(dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    gateway = gateway_without_servers(gateway_context(dispatcher), ByteTokenizer())
    events = gateway.generate(TextPrompt("hello"), SamplingParams(max_tokens=1))
    assert isinstance(await anext(events), Accepted)
    closing = asyncio.ensure_future(events.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert gateway.active == 0
