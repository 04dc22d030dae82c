"""Requests in a gateway's admission queue, over real dispatchers and workers in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import Accepted, Completed, DeadlineExceeded, Delta, Event, Queued, Rejected
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import SimCluster, open_cluster
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery
from cluster.spec import ClassSpec, ClusterSpec
from tests.offline.sim.cases import ENGINE, colocated, models, split
from workers.costs import LinearCost
from workers.request import SLO, Request, SamplingParams

T = TypeVar("T")
# A prompt token takes a millisecond, a decode step ten for each sequence.
COST = LinearCost(0.001, 0.001, 0.0, 0.01, 0.0, 0.0, 0.0)
CLASSES = {
    "interactive": ClassSpec(ttft_s=1.0, tpot_s=0.035, max_wait_s=20.0),
    "batch": ClassSpec(priority=1, max_wait_s=30.0, max_queued=8),
}


def promising(spec: ClusterSpec, classes: dict[str, ClassSpec] = CLASSES, **gateway: object) -> ClusterSpec:
    made = replace(spec.gateway, admission="slo", classes=classes, **gateway)  # type: ignore[arg-type]
    return replace(spec, gateway=made)


@asynccontextmanager
async def opened(spec: ClusterSpec) -> AsyncIterator[SimCluster]:
    """At the end nobody waits, and nothing is held anywhere."""
    async with open_cluster(spec, models(spec, COST)) as cluster:
        yield cluster
        for dispatcher in cluster.dispatchers:
            dispatcher._admission_queue.queue.check()
            assert not len(dispatcher._admission_queue.queue) and not dispatcher._admission_queue._waiting
            assert len(dispatcher._policy.active) == 0
            assert dispatcher._admission_queue._timer is None and dispatcher._admission_queue._watching is None
        await asyncio.sleep(1.0)  # the last cancels arrive
        for worker in cluster.runtime.workers.values():
            worker.engine.check()
            stats = worker.engine.stats()
            assert stats.free_blocks == stats.total_blocks, f"{worker.config.name}: {stats}"


def in_virtual_time(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scene()

    run(whole())


def request(name: str, of: str = "interactive", length: int = 20, *, max_tokens: int = 20, tenant: str = "") -> Request:
    prompt = tuple((hash_of(name) + index) % 900 + 1 for index in range(length))
    sampling = SamplingParams(seed=1, max_tokens=max_tokens)
    return Request(name, prompt, sampling, SLO(class_name=of), tenant=tenant)


def hash_of(name: str) -> int:
    return sum(ord(letter) * 7**place for place, letter in enumerate(name))


class Seen:
    """One request as its client sees it, with times."""

    def __init__(self, dispatcher: Dispatcher, asked: Request, **options: float) -> None:
        self.asked = asked
        self.events: list[tuple[float, Event]] = []
        self.begin_s = asyncio.get_running_loop().time()
        self.task = asyncio.ensure_future(dispatcher.run(asked, self.see, **options))  # type: ignore[arg-type]

    def see(self, event: Event) -> None:
        self.events.append((asyncio.get_running_loop().time() - self.begin_s, event))

    def first(self, kind: type[T]) -> tuple[float, T] | None:
        return next(((at_s, event) for at_s, event in self.events if isinstance(event, kind)), None)

    @property
    def ttft_s(self) -> float:
        found = self.first(Delta)
        assert found is not None
        return found[0]

    @property
    def tpot_s(self) -> float:
        times = [at_s for at_s, event in self.events if isinstance(event, Delta) for _ in event.tokens]
        return (times[-1] - times[0]) / (len(times) - 1)

    @property
    def end(self) -> Completed:
        found = self.first(Completed)
        assert found is not None
        return found[1]


@pytest.mark.parametrize("spec", [colocated(), split()])
def test_a_request_without_a_slot_is_queued_with_a_prediction_and_admitted_later(spec: ClusterSpec) -> None:
    async def scene() -> None:
        async with opened(promising(spec)) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = []
            for number in range(4):
                seen.append(Seen(dispatcher, request(f"r{number}")))
                await asyncio.sleep(0.05)
            await asyncio.gather(*(each.task for each in seen))
            for each in seen:
                assert each.ttft_s <= 1.0 and each.tpot_s <= 0.035
                each.end.ledger.check()
            assert [each.first(Queued) is not None for each in seen] == [False, False, False, True]
            queued, accepted = seen[3].first(Queued), seen[3].first(Accepted)
            assert queued is not None and accepted is not None and queued[0] < accepted[0]
            assert queued[1].position == 0 and "the SLO is 0.035 s" in queued[1].reason
            assert queued[1].predicted_start_s > 0.0
            assert queued[1].predicted_ttft_s == pytest.approx(seen[3].ttft_s, abs=0.5)
            assert accepted[1].predicted_ttft_s == pytest.approx(seen[3].ttft_s, abs=0.1)
            assert dict(seen[3].end.ledger.first)["route"] == pytest.approx(accepted[0] * 1e9, rel=0.1)

    in_virtual_time(scene)


def test_batch_requests_use_free_capacity_and_break_no_slo() -> None:
    async def scene() -> None:
        async with opened(promising(colocated(2))) as cluster:
            (dispatcher,) = cluster.dispatchers
            batch = [Seen(dispatcher, request(f"b{number}", "batch", 200, max_tokens=40)) for number in range(8)]
            seen = []
            for number in range(20):
                seen.append(Seen(dispatcher, request(f"i{number}")))
                await asyncio.sleep(0.3)
            await asyncio.gather(*(each.task for each in batch + seen))
            assert all(each.ttft_s <= 1.0 and each.tpot_s <= 0.035 for each in seen)
            assert any(each.first(Queued) for each in batch)

    in_virtual_time(scene)


def test_a_request_beyond_the_queue_limit_is_refused_with_a_retry_time() -> None:
    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = [Seen(dispatcher, request(f"b{number}", "batch", 900)) for number in range(9)]
            await asyncio.sleep(0.1)
            with pytest.raises(Rejected, match=r"the queue of class 'batch' is full \(8 of 8\)") as refused:
                await dispatcher.run(request("more", "batch", 900), lambda _: None)
            assert refused.value.retry_after_s == pytest.approx(8 * 0.9, rel=0.3), "as long as those before it take"
            await asyncio.gather(*(each.task for each in seen))

    in_virtual_time(scene)


def test_a_higher_priority_is_admitted_though_the_queue_is_full() -> None:
    async def scene() -> None:
        async with opened(promising(colocated(2), max_queued=4)) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = []
            for number in range(6):
                seen.append(Seen(dispatcher, request(f"b{number}", "batch", 800)))
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.6)
            with pytest.raises(Rejected, match="the queue of this gateway is full"):
                await dispatcher.run(request("more", "batch", 900), lambda _: None)
            quick = Seen(dispatcher, request("quick", max_tokens=2))
            await quick.task
            assert quick.first(Queued) is None and quick.ttft_s <= 1.0
            await asyncio.gather(*(each.task for each in seen))

    in_virtual_time(scene)


def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            first = Seen(dispatcher, request("long", "batch", 3000))
            await asyncio.sleep(0.1)
            with pytest.raises(DeadlineExceeded, match="queueing"):
                await dispatcher.run(request("b", "batch"), lambda _: None, deadline_s=0.5)
            await first.task

    in_virtual_time(scene)


def test_a_request_whose_slo_breaks_in_the_queue_is_refused() -> None:
    """Ten decodes of four hundred tokens end late: whoever waits for one of them learns in time that it is in vain."""

    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            long = [Seen(dispatcher, request(f"l{number}", max_tokens=400)) for number in range(3)]
            await asyncio.sleep(3.0)
            one = Seen(dispatcher, request("one", max_tokens=2))
            (end,) = await asyncio.gather(one.task, return_exceptions=True)
            assert isinstance(end, Rejected) and end.retry_after_s > 0.0
            assert asyncio.get_running_loop().time() - one.begin_s <= 1.0 + 1.1
            await asyncio.gather(*(each.task for each in long))

    in_virtual_time(scene)


def test_predicted_queue_times_are_accurate() -> None:
    classes = {"relaxed": ClassSpec(ttft_s=20.0, tpot_s=0.035)}

    async def scene() -> None:
        async with opened(promising(colocated(2), classes)) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = []
            for number in range(40):
                seen.append(Seen(dispatcher, request(f"r{number}", "relaxed")))
                await asyncio.sleep(0.01)
            await asyncio.gather(*(each.task for each in seen))
            queued = [(each, found[1]) for each in seen if (found := each.first(Queued)) is not None]
            assert len(queued) >= 30
            assert max(each.ttft_s for each in seen) > 3.0
            positions = [event.position for _, event in queued]
            assert positions == sorted(positions) and positions[-1] > 25
            for each, event in queued:
                assert event.predicted_ttft_s == pytest.approx(each.ttft_s, rel=0.4, abs=0.5)

    in_virtual_time(scene)


def test_a_request_that_would_miss_its_slo_is_refused_on_arrival_with_a_retry_time() -> None:
    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = []
            for number in range(30):
                seen.append(Seen(dispatcher, request(f"r{number}")))
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            early = [each.task.exception() for each in seen if each.task.done()]
            assert len(early) > 15
            for error in early:
                assert isinstance(error, Rejected) and "queued requests the first token would take" in str(error)
                assert error.retry_after_s > 0.3
            await asyncio.gather(*(each.task for each in seen), return_exceptions=True)

    in_virtual_time(scene)


def test_requests_far_back_in_the_queue_are_refused_once_it_is_too_late() -> None:
    """Answers were short so far, so all hope; then come long ones, and eight wait in front who may wait for long."""
    classes = {"patient": ClassSpec(ttft_s=50.0, tpot_s=0.035, on_miss="queue"), **CLASSES}

    async def scene() -> None:
        async with opened(promising(colocated(), classes)) as cluster:
            (dispatcher,) = cluster.dispatchers
            await asyncio.gather(*(Seen(dispatcher, request(f"s{n}", max_tokens=3)).task for n in range(9)))
            long = [Seen(dispatcher, request(f"l{number}", max_tokens=300)) for number in range(3)]
            await asyncio.sleep(0.2)
            ahead = [Seen(dispatcher, request(f"p{number}", "patient")) for number in range(8)]
            behind = [Seen(dispatcher, request(f"r{number}")) for number in range(4)]
            ends = await asyncio.gather(*(each.task for each in behind), return_exceptions=True)
            assert all(each.first(Queued) is not None for each in behind)
            assert all(isinstance(end, Rejected) for end in ends)
            assert 1.0 <= asyncio.get_running_loop().time() - behind[0].begin_s <= 2.1
            await asyncio.gather(*(each.task for each in long + ahead), return_exceptions=True)

    in_virtual_time(scene)


def test_an_overdue_request_is_admitted_before_all_others() -> None:
    """Interactive requests come faster than they can be served, on end: batch would never see a free moment."""

    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = [Seen(dispatcher, request(f"i{number}", max_tokens=60)) for number in range(3)]
            await asyncio.sleep(0.1)
            batch = Seen(dispatcher, request("b", "batch"))
            for number in range(3, 400):
                seen.append(Seen(dispatcher, request(f"i{number}", max_tokens=60)))
                await asyncio.sleep(0.15)
            ends = await asyncio.gather(*(each.task for each in seen), return_exceptions=True)
            await batch.task
            assert sum(isinstance(end, Rejected) for end in ends) > 50, "there was more than could be served"
            assert 30.0 <= batch.ttft_s <= 32.0
            kept = [each for each, end in zip(seen, ends, strict=True) if end is None]
            broken = [each for each in kept if each.ttft_s > 1.0 or each.tpot_s > 0.035]
            assert len(broken) <= 3, "only those who decode beside it"

    in_virtual_time(scene)


def test_the_wait_in_the_queue_has_a_limit() -> None:
    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            dispatcher._policy.choose = lambda query: Enqueue("never", 1.0, 1.0)
            begin_s = asyncio.get_running_loop().time()
            with pytest.raises(Rejected, match="no turn came within 90 s"):
                await dispatcher.run(request("b", "batch"), lambda _: None)
            assert asyncio.get_running_loop().time() - begin_s == pytest.approx(30.0 + 60.0)

    in_virtual_time(scene)


def test_tenants_get_their_shares_under_load() -> None:
    classes = {"batch": ClassSpec(max_queued=200, max_wait_s=1000.0)}
    shares = {"alice": 0.75, "bob": 0.25}

    async def scene() -> None:
        async with opened(promising(colocated(), classes, tenants=shares)) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = [
                Seen(dispatcher, request(f"{tenant}{number}", "batch", 500, max_tokens=2, tenant=tenant))
                for number in range(40)
                for tenant in shares
            ]
            await asyncio.gather(*(each.task for each in seen))
            order = sorted(seen, key=lambda each: each.ttft_s)[:40]
            assert sum(each.asked.tenant == "alice" for each in order) == pytest.approx(30, abs=2)

    in_virtual_time(scene)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["interactive", "batch"]), st.floats(0.0, 0.2), st.none() | st.floats(0.0, 2.0)),
        min_size=1,
        max_size=25,
    ),
    st.booleans(),
)
def test_clients_that_disconnect_at_any_time_leave_nothing_behind(
    asked: list[tuple[str, float, float | None]], is_split: bool
) -> None:
    async def leave(seen: Seen, after_s: float) -> None:
        await asyncio.sleep(after_s)
        seen.task.cancel()

    async def scene() -> None:
        async with opened(promising(split() if is_split else colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen, leaving = [], []
            for number, (of, gap_s, after_s) in enumerate(asked):
                seen.append(Seen(dispatcher, request(f"r{number}", of, 100)))
                if after_s is not None:
                    leaving.append(asyncio.ensure_future(leave(seen[-1], after_s)))
                await asyncio.sleep(gap_s)
            await asyncio.gather(*leaving)
            ends = await asyncio.gather(*(each.task for each in seen), return_exceptions=True)
            for each, end, (_, _, after_s) in zip(seen, ends, asked, strict=True):
                gone = after_s is not None and isinstance(end, asyncio.CancelledError)
                assert gone or isinstance(end, Rejected | None)
                assert end is not None or each.end.completion_tokens == 20

    in_virtual_time(scene)


def test_a_request_cancelled_at_admission_returns_its_placement() -> None:
    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            seen = [Seen(dispatcher, request(f"r{number}")) for number in range(5)]
            await asyncio.sleep(0.1)
            waiting = [each for each in seen if each.first(Queued) is not None]
            begun, began = [], dispatcher._policy.began

            def leave(query: PlacementQuery, placement: Placement) -> None:
                began(query, placement)
                begun.append(query.request.id)
                if len(begun) == 1:
                    asyncio.get_running_loop().call_soon(waiting[0].task.cancel)

            dispatcher._policy.began = leave
            ends = await asyncio.gather(*(each.task for each in waiting), return_exceptions=True)
            assert begun[0] == waiting[0].asked.id and isinstance(ends[0], asyncio.CancelledError)
            assert waiting[0].first(Accepted) is None
            await asyncio.gather(*(each.task for each in seen if each not in waiting))

    in_virtual_time(scene)


def test_two_gateways_cannot_grant_the_same_slot() -> None:
    """Both see a free slot at the same moment; the worker gives it to one, and the other waits there for the next."""

    async def scene() -> None:
        spec = promising(split(gateways=2))
        async with opened(replace(spec, health=replace(spec.health, heartbeat_s=5.0, dead_after_s=20.0))) as cluster:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    stats = cluster.runtime.workers["decode-0"].engine.stats()
                    most = max(most, stats.running + stats.reserved)
                    await asyncio.sleep(0.001)

            watching = asyncio.ensure_future(watch())
            seen = [
                Seen(dispatcher, request(f"g{which}n{number}"))
                for number in range(3)
                for which, dispatcher in enumerate(cluster.dispatchers)
            ]
            ends = await asyncio.gather(*(each.task for each in seen), return_exceptions=True)
            watching.cancel()
            served = [each for each, end in zip(seen, ends, strict=True) if end is None]
            assert len(served) >= 5 and most == 3
            assert all(each.tpot_s <= 0.035 for each in served)

    in_virtual_time(scene)


def test_a_request_whose_slot_another_gateway_took_is_placed_elsewhere() -> None:
    async def scene() -> None:
        spec = promising(split(gateways=2))
        async with opened(replace(spec, health=replace(spec.health, heartbeat_s=5.0, dead_after_s=20.0))) as cluster:
            seen = [
                Seen(dispatcher, request(f"g{which}n{number}", max_tokens=100))
                for number in range(3)
                for which, dispatcher in enumerate(cluster.dispatchers)
            ]
            ends = await asyncio.gather(*(each.task for each in seen), return_exceptions=True)
            assert sum(end is None for end in ends) == 3
            for each, end in zip(seen, ends, strict=True):
                if end is None:
                    assert each.ttft_s <= 1.0 and each.tpot_s <= 0.035
                else:
                    assert isinstance(end, Rejected) and "no decode slot or blocks within 1.0 s" in str(end)

    in_virtual_time(scene)


def test_a_membership_change_starts_a_round_at_once() -> None:
    async def scene() -> None:
        async with opened(promising(colocated())) as cluster:
            (dispatcher,) = cluster.dispatchers
            first = Seen(dispatcher, request("long", "batch", 3000))
            await asyncio.sleep(0.1)
            waiting = Seen(dispatcher, request("b", "batch"))
            await asyncio.sleep(0.05)
            assert waiting.first(Queued) is not None
            asked, choose = [], dispatcher._policy.choose
            dispatcher._policy.choose = lambda query: asked.append(query.now_s) or choose(query)  # type: ignore
            now_s = asyncio.get_running_loop().time()
            dispatcher.discovery.take(dispatcher.discovery.membership)
            for _ in range(5):
                await asyncio.sleep(0)
            assert asked == [now_s]
            await asyncio.gather(first.task, waiting.task)

    in_virtual_time(scene)


def test_a_request_whose_worker_is_lost_before_its_start_is_placed_again() -> None:
    async def scene() -> None:
        async with opened(promising(colocated(2), rebalance=False)) as cluster:
            (dispatcher,) = cluster.dispatchers
            admission_queue, roster = dispatcher._admission_queue, dispatcher.discovery
            resolve, left = admission_queue._resolve, list[str]()

            def resolved(guest, *, served=False):
                turn = resolve(guest, served=served)
                if served and not left:

                    def news() -> None:  # the very next callback: before the coroutine of the turn
                        known = roster.membership
                        placed = turn.result()
                        assert isinstance(placed, Placement)
                        left.append(placed.prefill)
                        stay = tuple(each for each in known.view.workers if each.name != left[0])
                        view = replace(known.view, revision=known.revision + 1, workers=stay)
                        roster.take(structs.replace(known, view=view))

                    asyncio.get_running_loop().call_soon(news)
                return turn

            admission_queue._resolve = resolved
            seen = [Seen(dispatcher, request(f"r{n}", "batch", max_tokens=40)) for n in range(9)]
            ends = await asyncio.gather(*(each.task for each in seen), return_exceptions=True)
            assert left, "nobody was given a turn"
            assert all(end is None or isinstance(end, Rejected) for end in ends), ends
            assert sum(end is None for end in ends) >= 8

    in_virtual_time(scene)


def served_by(gateways: int, busy: int) -> list[int]:
    """The answers of each busy gateway after a minute of more work than two decode workers can do."""
    found: list[int] = []
    classes = CLASSES | {"batch": ClassSpec(priority=1, max_wait_s=1e6, max_queued=100)}
    spec = promising(split(1, 2, gateways=gateways), classes)

    async def scene() -> None:
        async with opened(replace(spec, health=replace(spec.health, heartbeat_s=0.25))) as cluster:
            of = [
                [Seen(dispatcher, request(f"g{which}n{n}", "batch", 40, max_tokens=200)) for n in range(60)]
                for which, dispatcher in enumerate(cluster.dispatchers[:busy])
            ]
            await asyncio.sleep(60.0)
            found.extend(sum(each.first(Completed) is not None for each in mine) for mine in of)
            tasks = [each.task for mine in of for each in mine]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    in_virtual_time(scene)
    return found


def test_gateways_get_equal_shares_of_the_slots_whatever_their_number() -> None:
    (alone,) = served_by(1, 1)
    assert served_by(4, 1) == [alone], "the shares of idle gateways are used"
    for gateways in (2, 4):
        shares = served_by(gateways, gateways)
        assert min(shares) >= 0.6 * max(shares) and sum(shares) >= 0.8 * alone, shares


def test_the_engine_gets_the_time_that_a_request_waited() -> None:
    spec = promising(colocated(engine=replace(ENGINE, prompt_order="deadline")))

    async def scene() -> None:
        async with opened(spec) as cluster:
            (dispatcher,) = cluster.dispatchers
            received: list[float] = []
            worker: Any = cluster.runtime.workers["mixed-0"]
            generate = worker.generate

            async def heard(asked: Request, *lenders: object) -> None:
                received.append(asked.waited_s)
                await generate(asked, *lenders)

            worker.generate = heard
            seen = [Seen(dispatcher, request(f"r{number}")) for number in range(4)]
            await asyncio.gather(*(each.task for each in seen))
            accepted = [each.first(Accepted) for each in seen]
            assert received[:3] == [0.0, 0.0, 0.0]
            assert accepted[3] is not None and received[3] == pytest.approx(accepted[3][0], abs=0.01)

    in_virtual_time(scene)
