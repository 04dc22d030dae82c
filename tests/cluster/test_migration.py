"""Requests that change workers within their prompt or their answer, at every moment, with simulated times."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster.events import Accepted, Completed, Delta, Event
from cluster.offline.sim import clock
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import ClusterSpec, PoolSpec, Role
from tests.cluster.local import Cluster, cluster, completed, generate, request, split_spec, tokens_of
from workers.costs import LinearCost
from workers.engine.step import StepPlan, StepResult
from workers.errors import Overloaded, UnknownSequence
from workers.executor.simulated import simulated_token
from workers.request import Request, Reservation

Execute = Callable[[StepPlan], Awaitable[StepResult]]
SLOW = LinearCost(0.02, 0.002, 0.0, 0.001, 0.0, 0.0, 0.0)


def expected(name: str, length: int, count: int) -> list[int]:
    return [simulated_token(f"{name}/0", length + n, 1000, (0,)) for n in range(count)]


def cuts(subject: Cluster, cut_tokens: int) -> None:
    """From now on whatever is placed on two workers is cut there."""
    policy = subject.dispatcher._policy
    honest = policy.choose

    def choose(query: PlacementQuery) -> Any:
        placement = honest(query)
        return structs.replace(placement, cut_tokens=cut_tokens) if isinstance(placement, Placement) else placement

    policy.choose = choose


def sized(prefill: int, decode: int, **engine: Any) -> ClusterSpec:
    """A pair whose blocks have these sizes."""
    spec = split_spec(**engine)
    pools = tuple(
        replace(pool, engine=replace(pool.engine, block_size=size))
        for pool, size in zip(spec.pools, (prefill, decode), strict=True)
    )
    return replace(spec, pools=pools)


@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    cut=st.integers(1, 160),
    sizes=st.sampled_from([(16, 16), (8, 16), (16, 8), (12, 8)]),
    budget=st.integers(16, 64),
)
def test_a_prompt_may_be_cut_at_any_token(lengths: list[int], cut: int, sizes: tuple[int, int], budget: int) -> None:
    async def run() -> None:
        async with cluster(sized(*sizes, max_batch_tokens=budget)) as subject:
            cuts(subject, cut)
            runs = await asyncio.gather(*(subject.run(request(f"r{n}", length)) for n, length in enumerate(lengths)))
            for n, (length, events) in enumerate(zip(lengths, runs, strict=True)):
                assert tokens_of(events) == expected(f"r{n}", length, 8)
                end = completed(events)
                end.ledger.check()
                assert end.attempts == 1
                assert {"prefill_compute", "prefill_wire"} <= dict(end.ledger.first).keys()
            await subject.settle()

    asyncio.run(run())


async def test_a_cut_prompt_is_computed_by_both_workers_and_its_head_is_fetched() -> None:
    async with cluster(split_spec(), SLOW) as subject:
        cuts(subject, 40)
        end = completed(await subject.run(request("a", 100)))
        (report,) = end.transfers
        assert report.num_blocks == 3 == report.digests_verified  # 40 tokens in blocks of 16
        assert end.ledger.ttft_ns > 1e9 * (100 * 0.002 + 2 * 0.02)
        first = dict(end.ledger.first)
        assert first["prefill_compute"] > 1e9 * 100 * 0.002 and "transfer_wait" in first
        await subject.settle()


async def test_a_head_that_the_decode_worker_has_cached_is_not_recomputed() -> None:
    async with cluster(split_spec()) as subject:
        await subject.run(request("a", 64))
        steps = subject.workers["prefill-0"].engine.stats().steps
        cuts(subject, 40)
        events = await subject.run(request("b", 100))
        assert tokens_of(events) == expected("b", 100, 8)
        assert completed(events).transfers == () and completed(events).cached_tokens == 64
        assert subject.workers["prefill-0"].engine.stats().steps == steps
        completed(events).ledger.check()
        await subject.settle()


async def test_a_head_shorter_than_what_the_decode_worker_has_moves_nothing() -> None:
    """It did not say so when it was asked to reserve: others computed the prompt meanwhile."""
    async with cluster(split_spec()) as subject:
        await subject.run(request("a", 64))
        decode: Any = subject.workers["decode-0"]
        honest = decode.reserve

        async def forgetful(asked: Request, timeout_s: float) -> Reservation:
            return replace(await honest(asked, timeout_s), cached_tokens=0)

        decode.reserve = forgetful
        cuts(subject, 40)
        events = await subject.run(request("b", 100))
        assert tokens_of(events) == expected("b", 100, 8) and completed(events).attempts == 1
        assert completed(events).transfers[0].num_bytes == 0
        await subject.settle()


async def test_parallel_samples_and_prompts_with_logprobs_are_not_cut() -> None:
    async with cluster(split_spec()) as subject:
        cuts(subject, 40)
        sibling = replace(request("a#0", 100), group="a")
        scored = request("b", 90, first=300)
        scored = replace(scored, sampling=replace(scored.sampling, prompt_logprobs=0))
        for each in (sibling, scored):
            assert completed(await subject.run(each)).transfers[0].num_blocks >= 6
        await subject.settle()


@settings(max_examples=40, deadline=None)
@given(after_s=st.floats(0.0, 0.9), victim=st.sampled_from(["prefill-0", "decode-0"]), cut=st.integers(1, 89))
def test_a_worker_death_during_a_cut_prompt_loses_no_token(after_s: float, victim: str, cut: int) -> None:
    async def run() -> None:
        async with cluster(split_spec(2, 2, backends=("simulated",)), SLOW) as subject:
            cuts(subject, cut)
            streams = [asyncio.ensure_future(subject.run(request(f"r{n}", 90 + n, max_tokens=12))) for n in range(4)]
            await asyncio.sleep(after_s)
            await subject.workers[victim].close()
            for n, events in enumerate(await asyncio.gather(*streams)):
                assert tokens_of(events) == expected(f"r{n}", 90 + n, 12)
                completed(events).ledger.check()
            await subject.settle()

    clock.run(run())


@settings(max_examples=40, deadline=None)
@given(after_s=st.floats(0.0, 0.5), cut=st.integers(1, 119))
def test_closing_the_stream_of_a_cut_prompt_frees_both_workers(after_s: float, cut: int) -> None:
    async def run() -> None:
        async with cluster(split_spec(backends=("simulated",)), SLOW) as subject:
            cuts(subject, cut)
            running = asyncio.ensure_future(subject.run(request("a", 120, max_tokens=500)))
            await asyncio.sleep(after_s)
            running.cancel()
            await asyncio.wait([running])
            await subject.settle()

    clock.run(run())


# ---- moving a decode -----------------------------------------------------------------------------------------------


def peer_spec(workers: int, **engine: int) -> ClusterSpec:
    """Workers that do all, and any two of which are linked."""
    spec = split_spec(backends=("simulated",), **engine)
    pools = (PoolSpec("mixed", Role.MIXED, workers, engine=spec.pools[0].engine),)
    return replace(spec, pools=pools)


Move = tuple[float, int, int]  # when, which request, to which worker


@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12),
    killed_s=st.none() | st.floats(0.1, 2.0),
    cut=st.just(0) | st.integers(1, 60),
    split=st.booleans(),
    tight=st.booleans(),
)
def test_migrations_at_any_time_lose_and_repeat_no_token(
    moves: list[Move], killed_s: float | None, cut: int, split: bool, tight: bool
) -> None:
    """Also where a worker dies among them, and where blocks are so few that decodes are preempted."""
    engine = {"kv_blocks": 30} if tight else {}
    spec = split_spec(1, 2, backends=("simulated",), **engine) if split else peer_spec(3, **engine)

    async def run() -> None:
        async with cluster(spec, SLOW) as subject:
            cuts(subject, cut)
            names = list(subject.workers)
            streams = [asyncio.ensure_future(subject.run(request(f"r{n}", 60 + n, max_tokens=50))) for n in range(4)]
            if killed_s is not None:
                asyncio.get_running_loop().call_later(
                    killed_s, lambda: asyncio.ensure_future(subject.workers[names[1]].close())
                )
            asked = []
            for wait_s, number, worker in moves:
                await asyncio.sleep(wait_s)
                asked.append(asyncio.ensure_future(subject.dispatcher.move(f"r{number}", names[worker])))
            for n, events in enumerate(await asyncio.gather(*streams)):
                assert tokens_of(events) == expected(f"r{n}", 60 + n, 50)
                completed(events).ledger.check()
                assert completed(events).attempts <= (1 if killed_s is None else 2)
            await asyncio.gather(*asked)
            subject.dispatcher._policy.active.check()
            assert not len(subject.dispatcher._policy.active)
            await subject.settle()

    clock.run(run())


def test_a_migrating_decode_never_stops() -> None:
    async def run() -> None:
        spec = peer_spec(2)
        async with cluster(replace(spec, transfer=replace(spec.transfer, lease_s=20.0)), SLOW) as subject:
            received: list[float] = []
            clock_s = asyncio.get_running_loop().time
            moved: asyncio.Task[bool] | None = None
            async for event in generate(subject.dispatcher, request("a", 100, max_tokens=60)):
                if isinstance(event, Accepted):
                    owner = event.decode_worker
                if isinstance(event, Delta):
                    received.append(clock_s())
                    if event.first_position == 10:
                        target = next(name for name in subject.workers if name != owner)
                        moved = asyncio.ensure_future(subject.dispatcher.move("a", target))
            assert moved is not None and await moved
            step_s = received[5] - received[4]
            assert max(after - before for before, after in itertools.pairwise(received[1:])) < 3 * step_s
            assert subject.workers[target].engine.stats().steps > 40
            assert isinstance(event, Completed) and len(event.transfers) == 1
            assert event.transfers[0].num_blocks >= 6
            await subject.settle()

    clock.run(run())


@pytest.mark.parametrize("length", [5, 100])
def test_a_decode_without_a_full_block_migrates_back_and_forth(length: int) -> None:
    async def run() -> None:
        async with cluster(peer_spec(2), SLOW) as subject:
            moving: list[asyncio.Task[bool]] = []
            events: list[Event] = []
            async for event in generate(subject.dispatcher, request("a", length, max_tokens=50)):
                events.append(event)
                if isinstance(event, Delta) and event.first_position in (3, 15, 25, 35):
                    owner = next(work.decode for work in subject.dispatcher._policy.active)
                    taker = next(name for name in subject.workers if name != owner)
                    moving.append(asyncio.ensure_future(subject.dispatcher.move("a", taker)))
            assert all(await asyncio.gather(*moving)) and len(moving) == 4
            assert tokens_of(events) == expected("a", length, 50)
            await subject.settle()

    clock.run(run())


# ---- who moves when --------------------------------------------------------------------------------------------------


def test_the_decodes_of_a_draining_worker_migrate_away() -> None:
    async def run() -> None:
        spec = split_spec(1, 3, backends=("simulated",))
        pools = tuple(replace(pool, min_replicas=1, max_replicas=3) for pool in spec.pools)
        async with cluster(replace(spec, pools=pools), SLOW) as subject:
            asked = [request(f"r{n}", 40 + n, max_tokens=400) for n in range(9)]
            streams = [asyncio.ensure_future(subject.run(each)) for each in asked]
            await asyncio.sleep(3.0)
            clock_s = asyncio.get_running_loop().time
            begun_s = clock_s()
            await subject.controller.drain("decode-0", deadline_s=600.0)
            while "decode-0" in subject.workers:
                await subject.controller.members(subject.controller.view().revision, 1.0)
            assert clock_s() - begun_s < 8.0 and not any(stream.done() for stream in streams)
            for n, events in enumerate(await asyncio.gather(*streams)):
                assert tokens_of(events) == expected(f"r{n}", 40 + n, 400)
                assert completed(events).attempts == 1
            await subject.settle()

    clock.run(run())


# ---- moves that fail -------------------------------------------------------------------------------------------------


async def refusing(*_: object) -> None:
    raise Overloaded("full", retry_after_s=1.0)


async def unknown(*_: object) -> None:
    raise UnknownSequence("not here")


async def hanging(*_: object) -> None:
    await asyncio.get_running_loop().create_future()


def spoil(subject: Cluster, failure: str, owner: str, taker: str) -> None:
    """Let the next move from one worker to the other fail in this way."""
    verb, how = failure.split()
    worker = subject.workers[owner if verb == "offer_migration" else taker]
    verbs = {"refused": refusing, "unknown": unknown, "hangs": hanging}
    if how == "dies":
        setattr(worker, verb, lambda *_: worker.close())
    else:
        setattr(worker, verb, verbs[how])


@pytest.mark.parametrize(
    "failure",
    [
        *("reserve refused", "reserve hangs", "reserve dies"),
        *("offer_migration unknown", "offer_migration hangs"),
        *("fetch unknown", "fetch hangs", "fetch dies"),
        *("decode unknown", "decode refused", "decode dies"),
    ],
)
def test_a_failed_migration_does_not_disturb_the_stream(failure: str) -> None:
    async def run() -> None:
        async with cluster(peer_spec(2), SLOW) as subject:
            received: list[float] = []
            events: list[Event] = []
            moving: asyncio.Task[bool] | None = None
            async for event in generate(subject.dispatcher, request("a", 100, max_tokens=120)):
                events.append(event)
                if isinstance(event, Delta):
                    received.append(asyncio.get_running_loop().time())
                    if event.first_position == 10:
                        owner = next(each.decode_worker for each in events if isinstance(each, Accepted))
                        taker = next(name for name in subject.workers if name != owner)
                        spoil(subject, failure, owner, taker)
                        moving = asyncio.ensure_future(subject.dispatcher.move("a", taker, 1.0))
            assert moving is not None and await moving is False
            assert tokens_of(events) == expected("a", 100, 120) and completed(events).attempts == 1
            assert max(after - before for before, after in itertools.pairwise(received)) < 1.5 * (
                received[5] - received[4]
            )
            await subject.settle()

    clock.run(run())


async def test_a_decode_with_corrupt_kv_stays_on_its_worker() -> None:
    spec = peer_spec(2)
    async with cluster(replace(spec, transfer=replace(spec.transfer, backends=("memory",)))) as subject:
        for worker in subject.workers.values():
            honest = worker._executor.execute

            async def lying(plan: StepPlan, honest: Execute = honest) -> StepResult:
                result = await honest(plan)
                damaged = tuple(tuple(bytes([cells[0] ^ 1]) + cells[1:] for cells in rank) for rank in result.digests)
                return structs.replace(result, digests=damaged)

            worker._executor.execute = lying
        moved = []
        events = []
        async for event in generate(subject.dispatcher, request("a", 100, max_tokens=400)):
            events.append(event)
            if isinstance(event, Delta) and event.first_position in (10, 150):
                owner = next(each.decode_worker for each in events if isinstance(each, Accepted))
                taker = next(name for name in subject.workers if name != owner)
                moved.append(asyncio.ensure_future(subject.dispatcher.move("a", taker)))
        assert await asyncio.gather(*moved) == [False, False]
        assert tokens_of(events) == expected("a", 100, 400) and completed(events).attempts == 1
        await subject.settle()


def test_closing_a_stream_during_its_migration_frees_both_workers() -> None:
    async def run(after_s: float) -> None:
        async with cluster(peer_spec(2), SLOW) as subject:
            running = asyncio.ensure_future(subject.run(request("a", 100, max_tokens=500)))
            await asyncio.sleep(1.0)
            moves = [asyncio.ensure_future(subject.dispatcher.move("a", name)) for name in subject.workers]
            await asyncio.sleep(after_s)
            running.cancel()
            await asyncio.wait([running])
            async with asyncio.timeout(1.0):
                assert not any(await asyncio.gather(*moves)) or after_s > 0.01
            await subject.settle()

    for step in range(30):
        clock.run(run(step * 0.004))
