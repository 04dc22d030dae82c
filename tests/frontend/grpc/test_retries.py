"""Trying again: what may pass is waited out, and a stream that broke goes on with no token lost or doubled."""

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import Rejected
from cluster.frontend.grpc.server import GrpcServer
from cluster.frontend.text import TextDelta
from diptych.client import Answer, AsyncClient, answer_of
from diptych.errors import DiptychError
from diptych.retry import Received, Retry, Tries
from tests.frontend.grpc.conftest import OpenClient
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.grpc.relay import relayed
from tests.frontend.tokenizers import ByteTokenizer
from workers.request import Request, TokenLogprobs

QUICK = Retry(patience_s=10.0, wait_s=0.01, max_wait_s=0.05)


def drawn(request: Request) -> bytes:
    """Letters that follow from the seed, some of two bytes."""
    return "".join(Random(request.sampling.seed).choices("abcdeäöü", k=200)).encode()


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher(drawn, step_s=0.002)


async def test_a_cut_connection_loses_no_token(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    undisturbed = await client.complete("hello", max_tokens=120, seed=7, logprobs=1)
    async with relayed(client.endpoint) as relay, AsyncClient(relay.endpoint, retry=QUICK) as resuming:
        heard: list[TextDelta] = []
        cut_after = [3, 40, 41]  # or later: what a cut connection has delivered is still read
        async for event in resuming.generate("hello", max_tokens=120, seed=7, logprobs=1, prompt_logprobs=0):
            if isinstance(event, TextDelta):
                heard.append(event)
                if cut_after and len(heard) >= cut_after[0] and relay.num_connections == 4 - len(cut_after):
                    relay.cut()
                    del cut_after[0]
        assert relay.num_connections == 4
    outputs = TextDelta.join(heard)
    assert (outputs.text, outputs.tokens, outputs.logprobs) == (
        undisturbed.text,
        undisturbed.output.tokens,
        undisturbed.output.logprobs,
    )
    positions = [each.first_position for each in heard if each.tokens]
    assert positions == sorted(set(positions)) and len(outputs.prompt_logprobs) == 4
    assert not dispatcher.running


async def test_a_resumed_answer_without_a_seed_is_consistent(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    async with relayed(client.endpoint) as relay, AsyncClient(relay.endpoint, retry=QUICK) as resuming:
        events = []
        async for event in resuming.generate("hello", max_tokens=120, n=2):
            events.append(event)
            if len(events) == 6:
                relay.cut()
    first, last = [request.sampling.seed for request in dispatcher.requests[::2]]
    assert first == last
    assert {request.id.partition("#")[0].partition(".")[2] for request in dispatcher.requests} == {"", "1"}
    assert [each.tokens for each in answer_of(events).outputs] == [
        tuple(drawn(request)[:120]) for request in dispatcher.requests[2:]
    ]


async def test_a_retry_reaches_the_next_gateway_after_a_close(dispatcher: FakeDispatcher) -> None:
    servers = [GrpcServer(gateway_context(dispatcher), ByteTokenizer) for _ in range(2)]
    first, heir = [await server.open() for server in servers]
    async with relayed(first) as relay, AsyncClient(relay.endpoint, retry=QUICK) as resuming:
        events = resuming.generate("hello", max_tokens=120, seed=7)
        heard = [await anext(events) for _ in range(10)]
        relay.target = heir
        await servers[0].close(0.0)
        relay.cut()
        heard += [event async for event in events]
    await servers[1].close(0.0)
    assert answer_of(heard).output.tokens == tuple(drawn(dispatcher.requests[-1])[:120])


async def test_a_changed_answer_is_an_error_and_never_mixed(dispatcher: FakeDispatcher, client: AsyncClient) -> None:
    async with relayed(client.endpoint) as relay, AsyncClient(relay.endpoint, retry=QUICK) as resuming:
        events = resuming.generate("hello", max_tokens=60)
        for _ in range(10):
            await anext(events)
        dispatcher.script = lambda request: bytes(60)
        relay.cut()
        with pytest.raises(DiptychError, match="the retry's answer differs") as caught:
            async for _ in events:
                pass
    assert (caught.value.code, caught.value.reason) == ("DATA_LOSS", "ANSWER_CHANGED")


async def test_the_client_waits_as_long_as_a_full_gateway_asks(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.error = Rejected("no room", 0.3)
    async with AsyncClient(client.endpoint, retry=QUICK) as patient:
        started_s = asyncio.get_running_loop().time()
        waiting = asyncio.ensure_future(patient.complete("hello", max_tokens=3, seed=1))
        while not dispatcher.requests or dispatcher.running:
            await asyncio.sleep(0)
        dispatcher.error = None
        answer = await waiting
        assert asyncio.get_running_loop().time() - started_s > 0.3
    assert len(answer.output.tokens) == 3 and len(dispatcher.requests) == 2


async def test_without_retry_the_first_failure_is_raised(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.error = Rejected("no room", 0.01)
    with pytest.raises(DiptychError, match="no room"):
        await client.complete("hello")
    assert len(dispatcher.requests) == 1


async def test_retries_end_with_patience_or_deadline(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.error = Rejected("no room", 0.01)
    short = Retry(patience_s=0.5, wait_s=0.01, max_wait_s=0.05)
    async with AsyncClient(client.endpoint, retry=short) as patient, asyncio.timeout(30.0):
        with pytest.raises(DiptychError, match="no room"):
            await patient.complete("hello")
    tries = len(dispatcher.requests)
    assert tries > 2
    async with AsyncClient(client.endpoint, retry=Retry(wait_s=1.0)) as patient, asyncio.timeout(30.0):
        with pytest.raises(DiptychError, match="no room"):  # the next try would come too late
            await patient.complete("hello", timeout_s=0.3)
    assert len(dispatcher.requests) == tries + 1


async def test_a_batch_retries_only_unfinished_requests(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    answers: dict[int, Answer | DiptychError] = {}
    async with relayed(client.endpoint) as relay, AsyncClient(relay.endpoint, retry=QUICK) as resuming:
        dispatcher.script = lambda request: bytes(request.prompt) * (1 if len(request.prompt) == 1 else 60)
        async for index, answer in resuming.batch(["a", "bc", "de"], max_tokens=100):
            answers[index] = answer
            if len(answers) == 1:
                relay.cut()
    assert [answers[index].text for index in range(3)] == ["a", "bc" * 50, "de" * 50]  # type: ignore[union-attr]
    assert sorted(len(request.prompt) for request in dispatcher.requests) == [1, 2, 2, 2, 2]


async def test_an_empty_batch_is_refused_with_and_without_retry(client: AsyncClient) -> None:
    async with AsyncClient(client.endpoint, retry=QUICK) as patient:
        for each in (client, patient):
            with pytest.raises(DiptychError, match="has 0 requests"):
                await anext(each.batch([]))


async def test_status_with_retry_waits_for_a_starting_server(
    dispatcher: FakeDispatcher, open_client: OpenClient
) -> None:
    async with relayed("127.0.0.1:1") as relay, AsyncClient(relay.endpoint, retry=QUICK) as patient:
        waiting = asyncio.ensure_future(patient.status())
        while not relay.num_connections:
            await asyncio.sleep(0)
        relay.target = (await open_client()).endpoint
        assert (await waiting).gateway == "gateway-0"


def test_invalid_retry_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="patience_s is above 0"):
        Retry(patience_s=0.0)


def test_only_temporary_errors_are_retried() -> None:
    for failure in (
        DiptychError("INVALID_ARGUMENT", "bad"),
        DiptychError("RESOURCE_EXHAUSTED", "larger than any message may be"),
        DiptychError("ALREADY_EXISTS", "running"),
    ):
        with pytest.raises(DiptychError):
            Tries(Retry(), None).wait_s(failure, 0.0)


def cut_anyhow(text: str, tokens: list[int], cuts: list[int]) -> list[TextDelta]:
    """One token a letter, in pieces."""
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    logprobs = [TokenLogprobs(-float(token)) for token in tokens]
    return [
        TextDelta(text[start:end], tuple(tokens[start:end]), start, tuple(logprobs[start:end]))
        for start, end in zip([0, *ends], ends, strict=False)
        if end > start
    ]


@given(st.text("abc", min_size=1, max_size=30), st.lists(st.tuples(st.lists(st.integers(1, 30)), st.integers(0, 30))))
def test_any_pieces_of_any_tries_join_to_one_answer(text: str, tries: list[tuple[list[int], int]]) -> None:
    tokens = list(text.encode())
    received, given_out = Received(), []
    for cuts, heard in [*tries, ([], 30)]:
        received.begin()
        given_out += [new for each in cut_anyhow(text, tokens, cuts)[:heard] if (new := received.new(each))]
    outputs = TextDelta.join(given_out)
    assert (outputs.text, list(outputs.tokens)) == (text, tokens)
    assert [each.chosen for each in outputs.logprobs] == [-float(token) for token in tokens]
