"""An OpenAI server as an endpoint: request form detection, the server's token counts, counted failures."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from cluster.offline.load import http_endpoint
from cluster.offline.load.endpoint import EndpointError, Target
from cluster.offline.load.http_endpoint import VOCAB_SIZE, WORDS, HttpEndpoint, text_of
from cluster.offline.load.sender import LoadOptions, nothing
from cluster.offline.load.trials import open_endpoint
from cluster.offline.scoring.figures import figures
from cluster.offline.scoring.records import RequestOutcome, Run
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.changes import with_distinct_prompts
from cluster.offline.workload.load import load_workload
from tests.offline.load.made_up import MadeUp, made_up
from workers.request import SLO

FEW = Workload("few", tuple(Arrival(0.0, 20 + index, 6) for index in range(4)))


async def driven(server: MadeUp, workload: Workload = FEW, **load: object) -> Run:
    async with open_endpoint(Target(server.url, "made-up")) as endpoint:
        server.bodies.clear()
        server.most = 0
        return await endpoint.drive(workload, LoadOptions(endpoint.vocab_size, **load), nothing)  # type: ignore[arg-type]


async def description_of(server: MadeUp) -> str:
    async with open_endpoint(Target(server.url, "made-up")) as endpoint:
        return endpoint.description


async def test_every_token_counts_at_the_time_of_its_chunk() -> None:
    async with made_up(tokens_a_chunk=2, service_s=0.06) as server:
        run = await driven(server)
    for each, arrival in zip(run.served, FEW.arrivals, strict=True):
        assert each.outcome is RequestOutcome.FINISHED
        assert (each.prompt_tokens, len(each.token_s)) == (arrival.prompt_tokens, 6)
        assert [later == sooner for sooner, later in pairwise(each.token_s)] == [True, False, True, False, True]
    assert not any("chunks" in note for note in run.notes)


async def test_tokens_without_a_chunk_get_the_time_of_the_last_chunk_and_a_note() -> None:
    async with made_up(tokens_a_chunk=3, tells_in_chunks=False, service_s=0.04) as server:
        run = await driven(server)
    assert all(len(each.token_s) == 6 for each in run.served)
    assert all(len(set(each.token_s)) == 2 for each in run.served)
    assert any(note.startswith("16 tokens came in chunks without a token count") for note in run.notes)


async def test_without_usage_tokens_are_chunks_and_a_note_says_so() -> None:
    async with made_up(tokens_a_chunk=3, tells_in_chunks=False, tells_usage=False) as server:
        run = await driven(server)
    assert all(len(each.token_s) == 2 for each in run.served)
    assert any("4 answers came without usage" in note for note in run.notes)


async def test_a_server_gets_requests_as_it_takes_them() -> None:
    async with made_up() as server:
        assert (await description_of(server)).endswith("prompts as token ids")
        server.takes_ids = False
        assert (await description_of(server)).endswith("prompts as text")
        await driven(server)
        assert {len(body["prompt"].split()) for body in server.bodies} == {20, 21, 22, 23}
        server.takes_extras = False
        assert (await description_of(server)).endswith("prompts as text, answers may end early")
        server.takes_ids = True
        assert (await description_of(server)).endswith("prompts as token ids, answers may end early")


@pytest.mark.parametrize(
    ("settings", "outcome", "reason"),
    [
        ({"status": 429}, RequestOutcome.REJECTED, "HTTP 429"),
        ({"status": 503}, RequestOutcome.REJECTED, "HTTP 503"),
        ({"status": 500}, RequestOutcome.FAILED, "HTTP 500"),
        ({"cuts": True}, RequestOutcome.FAILED, "stream cut"),
        ({"service_s": 5.0}, RequestOutcome.FAILED, "deadline"),
        ({"sends": b"data: {no JSON\n\n"}, RequestOutcome.FAILED, "stream cut"),
        ({"sends": b"data: [1]\n\n"}, RequestOutcome.FAILED, "stream cut"),
        ({"sends": b'data: {"choices": 5}\n\n'}, RequestOutcome.FAILED, "stream cut"),
        ({"sends": b"data: " + b"x" * (3 << 20)}, RequestOutcome.FAILED, "stream cut"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_failure_is_counted_by_its_reason_and_the_run_goes_on(
    settings: dict[str, object], outcome: RequestOutcome, reason: str
) -> None:
    async with made_up() as server, open_endpoint(Target(server.url, "made-up")) as endpoint:
        for name, value in settings.items():
            setattr(server, name, value)
        deadline_s = 0.3 if reason == "deadline" else 20.0
        run = await endpoint.drive(FEW, LoadOptions(endpoint.vocab_size, deadline_s), nothing)
    assert {each.outcome for each in run.served} == {outcome}
    found = figures(run, SLO())
    assert found.reasons == ((reason, 4),) and (found.rejected + found.failed, found.finished) == (4, 0)


async def test_a_server_that_went_away_is_counted_too() -> None:
    async with made_up() as server:
        opening = open_endpoint(Target(server.url, "made-up"))
        endpoint = await opening.__aenter__()
    try:
        run = await endpoint.drive(FEW, LoadOptions(endpoint.vocab_size), nothing)
    finally:
        await opening.__aexit__(None, None, None)
    assert figures(run, SLO()).reasons == (("no connection", 4),)


@pytest.mark.parametrize(
    ("target", "settings", "says"),
    [
        ({"model": "mine"}, {}, "there is no model mine (HTTP 404); is this the server's /v1, and --model one of"),
        ({}, {}, "has 2 models (made-up, other); choose one with --model"),
        ({"model": "made-up"}, {"key": "secret"}, "give a key by --key-file, DIPTYCH_API_KEY or OPENAI_API_KEY"),
        ({"model": "made-up"}, {"status": 400}, "is refused: as the test wants it (HTTP 400)"),
        ({"model": "made-up"}, {"status": 500}, "fails: as the test wants it (HTTP 500)"),
        ({"model": "made-up"}, {"cuts": True}, "fails"),
    ],
)
async def test_what_cannot_be_measured_is_one_error(
    target: dict[str, str], settings: dict[str, object], says: str
) -> None:
    async with made_up(**settings) as server:
        with pytest.raises(EndpointError) as caught:
            async with open_endpoint(Target(server.url, **target)):  # type: ignore[arg-type]
                pass
    assert says in str(caught.value) and "\n" not in str(caught.value)


async def test_an_unreachable_server_is_one_error() -> None:
    async with made_up() as server:
        url = server.url
    for model in ("", "made-up"):
        with pytest.raises(EndpointError, match=r"127\.0\.0\.1"):
            async with open_endpoint(Target(url, model)):
                pass


@pytest.mark.parametrize("model", ["", "made-up"])
async def test_a_server_that_never_answers_is_one_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(http_endpoint, "TRIAL_S", 0.2)
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        with pytest.raises(EndpointError, match=r"did not answer within 0\.2 s"):
            async with open_endpoint(Target(url, model)):
                pass


async def test_a_key_is_sent() -> None:
    async with made_up(key="secret") as server, open_endpoint(Target(server.url, "made-up", "secret")) as endpoint:
        assert isinstance(endpoint, HttpEndpoint)
    assert "secret" not in repr(Target(server.url, "made-up", "secret"))


@pytest.mark.parametrize(("concurrency", "count"), [(1, 5), (4, 17), (9, 6)])
async def test_a_closed_loop_keeps_so_many_in_flight(concurrency: int, count: int) -> None:
    workload = Workload("many", tuple(Arrival(0.0, 10, 2) for _ in range(count)))
    async with made_up(service_s=0.03) as server:
        run = await driven(server, workload, concurrency=concurrency)
    held = min(concurrency, count)
    assert server.most == held
    sends = sorted(each.arrival_s for each in run.served)
    ends = sorted(each.token_s[-1] for each in run.served)
    idle_s = [sent - ended for sent, ended in zip(sends[held:], ends, strict=False)]
    assert len(idle_s) == count - held and all(0.0 <= each < 2.0 for each in idle_s), "who ends makes room at once"
    assert [each.outcome for each in run.served] == [RequestOutcome.FINISHED] * count
    assert all(each.ttft_s is not None and each.ttft_s < 2.0 for each in run.served), "from when it was sent"
    assert any(f"{concurrency} in flight" in note for note in run.notes)


async def test_a_slow_request_of_a_closed_loop_delays_no_other_slot() -> None:
    workload = Workload("many", tuple(Arrival(0.0, 10, 2) for _ in range(6)))
    async with made_up(slow_first_s=1.0) as server:
        run = await driven(server, workload, concurrency=2)
    assert server.most == 2
    slow, *others = sorted(run.served, key=lambda each: -(each.e2e_s or 0.0))
    assert all(each.token_s[-1] < slow.token_s[-1] for each in others)


async def test_equal_seeds_send_equal_requests_and_others_other_ones() -> None:
    async def sent(seed: int, number: int) -> list[Sequence[int]]:
        workload = with_distinct_prompts(load_workload("burst:count=6,lengths=20-40/3", seed=seed), number)
        await driven(server, workload, seed=seed)
        return sorted(body["prompt"] for body in server.bodies)

    async with made_up() as server:
        first, again, other_number, other_seed = await sent(1, 7), await sent(1, 7), await sent(1, 8), await sent(2, 7)
    assert first == again
    assert list(map(len, first)) != list(map(len, other_seed)) and sorted(map(len, first)) == sorted(
        map(len, other_number)
    )
    assert not {tuple(each[:9]) for each in first} & {tuple(each[:9]) for each in other_number}


def test_distinct_prompts_keep_their_shared_prefixes() -> None:
    arrivals = (Arrival(0.0, 40, 2, (5, 9)), Arrival(0.0, 40, 2, (5, 7)), Arrival(0.0, 40, 2))
    before = Workload("shared", arrivals, block_tokens=32)
    after = with_distinct_prompts(before, 3)
    one, two, three = (each.prefix for each in after.arrivals)
    assert one[0] == two[0] and len({*one, *two, *three}) == 4
    assert not {*one, *two, *three} & {
        block for each in with_distinct_prompts(before, 4).arrivals for block in each.prefix
    }


def test_words_are_one_for_each_token() -> None:
    assert len(set(WORDS)) == len(WORDS) and 3 + len(WORDS) == VOCAB_SIZE
    assert text_of((3, 4, 3)) == "time year time"


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


def test_with_a_tokenizer_words_are_cut_to_as_many_tokens() -> None:
    assert text_of((3, 4, 3, 5, 6), Letters()) == "time "
