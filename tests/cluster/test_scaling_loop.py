"""The scaling loop: one change at a time, each with its outcome; advice changes nothing, and no error is fatal."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from cluster.control.scaling_loop import MAX_ENTRIES, ClusterOperator, ScalingLoop
from cluster.control.supervision import Failures
from cluster.offline.sim.clock import run
from cluster.policy.scaling.offered_load import LoadReport
from cluster.runtime.interface import WorkerHandle, WorkerOrder
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.spec import ClusterSpec, Role
from diptych.view import ClusterView, Decision, DecisionRecord, PoolView, WorkerState, WorkerView
from tests.cluster.local import cluster, completed, request, split_spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PERIOD_S = 0.02
REPORT = LoadReport("gateway-0", 1.0, 3, 100)

Script = Callable[[ClusterView], Decision | None]


class Scripted:
    """Decides as it is told, and notes when it was asked."""

    def __init__(self, *script: Script | Decision | None) -> None:
        self.script = list(script)
        self.views: list[ClusterView] = []
        self.heard: list[LoadReport] = []

    def on_report(self, report: LoadReport, now_s: float) -> None:
        self.heard.append(report)

    def decide(self, view: ClusterView, now_s: float) -> Decision | None:
        self.views.append(view)
        step = self.script.pop(0) if self.script else None
        return step(view) if callable(step) else step


@asynccontextmanager
async def running(
    scaling_policy: Scripted, operator: ClusterOperator, *, acts: bool = True
) -> "AsyncIterator[ScalingLoop]":
    scaling_loop = ScalingLoop(scaling_policy, operator, PERIOD_S, 10.0, acts=acts)
    scaling_loop.start(Failures())
    try:
        yield scaling_loop
    finally:
        scaling_loop.close()


class Growing:
    """Wants the pool to grow whenever there is room."""

    def on_report(self, report: LoadReport, now_s: float) -> None: ...

    def decide(self, view: ClusterView, now_s: float) -> Decision | None:
        return GROW if room(view) else None


class Refusing:
    """A cluster in which no new worker finds room."""

    def __init__(self) -> None:
        self.newcomers: list[WorkerView] = []
        self.taken_back = 0

    def view(self) -> ClusterView:
        pool = PoolView("decode", Role.DECODE, 1 + len(self.newcomers), 1, 4)
        return ClusterView(1, "c", None, tuple(self.newcomers), pools=(pool,))

    async def flip(self, worker: str, role: Role, revision: int = 0) -> int:
        raise AssertionError

    async def drain(self, worker: str, revision: int = 0, deadline_s: float = 0.0) -> int:
        self.newcomers.clear()
        self.taken_back += 1
        return 1

    async def scale(self, pool: str, replicas: int, revision: int = 0) -> int:
        self.newcomers = [WorkerView("decode-1", pool, Role.DECODE, WorkerState.STARTING, detail="no room")]
        return 1


def room(view: ClusterView) -> int:
    """For so many more workers in the pool that decodes."""
    (pool,) = [each for each in view.pools if each.name == "decode"]
    return pool.max_replicas - pool.wanted


def bounded(spec: ClusterSpec) -> ClusterSpec:
    prefill, decode = spec.pools
    return replace(spec, pools=(prefill, replace(decode, min_replicas=1, max_replicas=4)))


async def until(scaling_loop: ScalingLoop, is_so: Callable[[tuple[DecisionRecord, ...]], bool]) -> list[str]:
    async with asyncio.timeout(20):
        while not is_so(scaling_loop.decisions()):
            await asyncio.sleep(PERIOD_S)
    return [taken.outcome for taken in scaling_loop.decisions()]


def over(count: int) -> Callable[[tuple[DecisionRecord, ...]], bool]:
    return lambda taken: len(taken) == count and all(each.outcome != "under way" for each in taken)


FLIP = Decision("flip", "TTFT is 3.0 of its SLO", "decode-1", Role.PREFILL)
GROW = Decision("grow", "both are over", pool="decode")


def shrink(worker: str) -> Decision:
    return Decision("shrink", "nobody needs it", worker, pool="decode")


async def test_decisions_are_applied_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    scaling_policy = Scripted(FLIP, GROW, shrink("decode-0"))
    async with cluster(split_spec(1, 2)) as subject, running(scaling_policy, subject.controller) as scaling_loop:
        assert await until(scaling_loop, over(3)) == ["done"] * 3
        view = subject.controller.view()
        assert {each.name: (each.role, each.state) for each in view.workers} == {
            "prefill-0": (Role.PREFILL, WorkerState.READY),
            "decode-1": (Role.PREFILL, WorkerState.READY),
            "decode-2": (Role.DECODE, WorkerState.READY),
        }
        asked_at_grow, asked_at_shrink = scaling_policy.views[1], scaling_policy.views[2]
        assert next(each.role for each in asked_at_grow.workers if each.name == "decode-1") is Role.PREFILL
        newcomer = next(each for each in asked_at_shrink.workers if each.name == "decode-2")
        assert newcomer.state is WorkerState.READY, "nothing else is decided while a worker starts"
        assert completed(await subject.run(request("after"))).attempts == 1
    said = [record.message for record in caplog.records if record.name == "cluster.control.scaling_loop"]
    assert "decided: decode-1: role set to prefill, TTFT is 3.0 of its SLO" in said
    assert "decided: decode: one worker more, both are over" in said
    assert "decided: decode: one worker fewer, decode-0 drains, nobody needs it" in said


async def test_advice_changes_nothing_and_is_logged_once() -> None:
    scaling_policy = Scripted(FLIP, FLIP, None, FLIP, GROW)
    async with cluster(split_spec(1, 2)) as subject:
        revision = subject.controller.view().revision
        async with running(scaling_policy, subject.controller, acts=False) as scaling_loop:
            await until(scaling_loop, lambda taken: len(scaling_policy.views) >= 6)
            assert [(each.decision, each.outcome) for each in scaling_loop.decisions()] == [
                (FLIP, "advised"),
                (GROW, "advised"),
            ]
        assert subject.controller.view().revision == revision


async def test_a_failed_decision_is_recorded_and_the_next_one_is_made() -> None:
    unknown = Decision("flip", "a mistake", "decode-9", Role.PREFILL)
    floored = Decision("flip", "too far", "prefill-0", Role.DECODE)

    def broken(view: ClusterView) -> None:
        raise ZeroDivisionError("no load at all")

    scaling_policy = Scripted(unknown, broken, floored, FLIP)
    async with cluster(split_spec(1, 2)) as subject, running(scaling_policy, subject.controller) as scaling_loop:
        outcomes = await until(scaling_loop, over(3))
        assert outcomes[0].startswith("failed: no worker 'decode-9'")
        assert "elastic.floors.prefill" in outcomes[1]
        assert outcomes[2] == "done"
        assert scaling_loop.counts() == (("flip", "done", 1), ("flip", "failed", 2))


async def test_a_decision_on_an_outdated_view_is_not_applied() -> None:
    async with cluster(split_spec(1, 3)) as subject:
        control = subject.controller

        class Slow:
            """An operator comes between the decision and the change."""

            view, drain, scale = control.view, control.drain, control.scale

            async def flip(self, worker: str, role: Role, revision: int = 0) -> int:
                await control.flip("decode-2", Role.PREFILL)
                return await control.flip(worker, role, revision)

        async with running(Scripted(FLIP), Slow()) as scaling_loop:
            (outcome,) = await until(scaling_loop, over(1))
            assert "was expected" in outcome
        assert next(each.role for each in control.view().workers if each.name == "decode-1") is Role.DECODE


async def test_a_worker_that_finds_no_room_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(bounded(split_spec(1, 1))) as subject:

        async def no_room(order: WorkerOrder) -> WorkerHandle:
            raise RuntimeUnavailable(f"no room for {order.config.name}")

        monkeypatch.setattr(subject.runtime, "start_worker", no_room)
        scaling_policy = Scripted(GROW)
        async with running(scaling_policy, subject.controller) as scaling_loop:
            (outcome,) = await until(scaling_loop, over(1))
            assert outcome == "failed: no room for decode-1; the pool does not grow by itself for 30 s"
            await subject.until(lambda view: [each.name for each in view.workers] == ["prefill-0", "decode-0"])
            seen = len(scaling_policy.views)
            async with asyncio.timeout(20):
                while len(scaling_policy.views) == seen:
                    await asyncio.sleep(PERIOD_S)
            assert room(scaling_policy.views[0]) == 3 and room(scaling_policy.views[-1]) == 0, (
                "it is left alone for a while"
            )


def test_a_pool_that_fails_to_grow_pauses_twice_as_long_each_time() -> None:
    """In virtual time: a pause, and a second until it is seen that nobody comes."""
    operator = Refusing()

    async def asked() -> list[float]:
        scaling_loop = ScalingLoop(Growing(), operator, 1.0, 100.0, acts=True)
        scaling_loop.start(Failures())
        await asyncio.sleep(2500.0)
        scaling_loop.close()
        return [2500.0 - taken.age_s for taken in scaling_loop.decisions()]

    times = run(asked())
    pauses = [round(later - sooner) for sooner, later in pairwise(times)]
    assert pauses[:5] == [31, 61, 121, 241, 481] and set(pauses[5:]) == {601}
    assert operator.taken_back == len(times)


async def test_roles_change_while_a_new_worker_waits_for_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(bounded(split_spec(1, 2))) as subject:
        start, node_is_up = subject.runtime.start_worker, asyncio.Event()

        async def start_when_up(order: WorkerOrder) -> WorkerHandle:
            await node_is_up.wait()
            return await start(order)

        monkeypatch.setattr(subject.runtime, "start_worker", start_when_up)
        scaling_policy = Scripted(GROW, FLIP)
        async with running(scaling_policy, subject.controller) as scaling_loop:
            assert (await until(scaling_loop, lambda taken: len(taken) == 2 and taken[1].outcome == "done"))[
                0
            ] == "under way"
            view = subject.controller.view()
            assert {each.name: each.waits_for for each in view.workers if each.waits_for} == {"decode-2": "{CPU: 1}"}
            assert room(scaling_policy.views[1]) == 0, "one node at a time"
            node_is_up.set()
            await until(scaling_loop, over(2))
            assert [each.outcome for each in scaling_loop.decisions()] == ["done", "done"]


async def test_reports_reach_the_decider_and_old_decisions_are_dropped() -> None:
    scaling_policy = Scripted(*(Decision("flip", "a", f"w-{index}", Role.MIXED) for index in range(MAX_ENTRIES + 3)))
    async with cluster(split_spec(1, 1)) as subject, running(scaling_policy, subject.controller) as scaling_loop:
        scaling_loop.on_report(REPORT)
        assert scaling_policy.heard == [REPORT]
        async with asyncio.timeout(20):
            while scaling_policy.script:
                await asyncio.sleep(PERIOD_S)
        assert len(scaling_loop.decisions()) <= MAX_ENTRIES
        assert scaling_loop.decisions()[-1].decision.worker.startswith("w-")
