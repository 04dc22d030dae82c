"""The frontend' benchmark counts the same tokens on both sides and fills its tables. No figure decides."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import count

import pytest

from benchmarks import frontend
from benchmarks.frontend import PROTOCOLS, LoadSize, figures, sampled
from benchmarks.pinning import process_cpu_s
from benchmarks.stream_load import Steady, lateness, one_token_each, steady
from cluster.offline.load.processes import Child, ProcessFailed

TINY = LoadSize((2, 3), 12, 32)


def clock() -> Callable[[], float]:
    """A second later each time it is read."""
    seconds = count()
    return lambda: float(next(seconds))


async def test_lateness_is_measured_against_the_streams_earliest_token() -> None:
    assert lateness([(10.0, 1), (10.5, 2), (11.25, 3), (11.5, 4)], 0.5) == [0.0, 0.0, 0.25, 0.0]
    assert lateness([(10.0, 1), (11.0, 3)], 0.5) == [0.0, 0.5, 0.0]  # two in one message, both as of its coming


async def test_cpu_time_covers_the_interval_in_which_all_streams_run() -> None:
    async def ask(tokens: int) -> AsyncGenerator[int, None]:
        for _ in range(tokens):
            await asyncio.sleep(0.01)
            yield 1

    taken = await steady(ask, clock(), 3, 20, 0.01)
    assert taken.cpu_s == 1.0 and 3 <= taken.tokens <= 60
    assert len(taken.late_s) == 60 and taken.token_cpu_s == 1.0 / taken.tokens


async def test_missing_tokens_raise_an_error() -> None:
    async def ask(tokens: int) -> AsyncGenerator[int, None]:
        for _ in range(tokens - 1):
            await asyncio.sleep(0)
            yield 1

    with pytest.RaisesGroup(pytest.RaisesExc(ProcessFailed, match="for one token had 0")):
        await one_token_each(ask, clock(), 1, 1)
    with pytest.RaisesGroup(pytest.RaisesExc(ProcessFailed, match="had 9 tokens instead of 10")):
        await steady(ask, clock(), 1, 10, 0.01)


async def test_a_load_with_late_tokens_is_repeated_and_the_least_late_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = iter((0.3, 0.2, 0.25, 0.04, 0.2))

    async def once(*_: object) -> Steady:
        return Steady(1, 1.0, 1.0, (next(late),))

    async def ask(tokens: int) -> AsyncGenerator[int, None]:
        yield tokens

    monkeypatch.setattr(frontend, "steady", once)
    assert (await frontend._timely(ask, clock(), 1, 1, 3)).late_s == (0.2,)
    assert (await frontend._timely(ask, clock(), 1, 1, 3)).late_s == (0.04,)
    assert list(late) == [0.2]


def test_cpu_time_of_an_ended_process_raises_an_error() -> None:
    with Child(["cat"]) as child:
        assert process_cpu_s(child.pid) > 0.0
    with pytest.raises(ProcessFailed, match="has ended"):
        process_cpu_s(child.pid)


@pytest.mark.campaign
def test_gateway_servers_and_bare_handlers_send_and_count_the_same_tokens() -> None:
    """`streams` refuses an answer that has not as many tokens as were asked for, by its messages or its own count."""
    samples = sampled(("bare", "servers"), 1, TINY, print)
    assert set(samples) == {(kind, system) for kind in PROTOCOLS for system in ("bare", "servers")}
    for (sample,) in samples.values():
        assert sample.request_cpu_s > 0.0
        assert {streams: len(each.late_s) for streams, each in sample.streams.items()} == {2: 24, 3: 36}
    made = figures(samples)
    assert {each.row for each in made if each.table == "CPU time of a token"} == {
        f"{kind}, {streams} streams" for kind in PROTOCOLS for streams in TINY.streams
    }
    assert {each.column for each in made} == {"bare", "servers", "servers / bare"}
    assert {each.table for each in made} == {"CPU time of a request for one token", *frontend.READINGS}


def test_the_served_clusters_step_takes_one_period() -> None:
    spec = frontend.served_spec()
    assert {pool.cost.decode_seconds(128, 99_999) for pool in spec.pools if pool.cost} == {frontend.PERIOD_S}
    most = (spec.gateway.max_requests, *(pool.engine.max_running for pool in spec.pools))
    assert min(most) >= max(frontend.FULL.streams)
