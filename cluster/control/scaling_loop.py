"""The scaling loop: passes load reports to the scaling policy, asks it every period, and applies its decision.

One change at a time, but a worker that waits for a node does not block others. If a new worker does not start, its pool
returns to its old size and does not grow for a while, twice as long each time. Knows no scaling rule.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.control.changes import ChangeError
from cluster.control.supervision import Failures, supervised
from cluster.policy.scaling.offered_load import LoadReport
from cluster.spec import Role
from diptych.view import ClusterView, Decision, DecisionRecord, WorkerState
from workers.log_fields import log_fields

logger = logging.getLogger(__name__)

MAX_ENTRIES = 64
GROW_AGAIN_S, MAX_GROW_AGAIN_S = 30.0, 600.0
ADVISED, UNDER_WAY, DONE = "advised", "under way", "done"


class ScalingPolicy(Protocol):
    """Pure: time is an argument."""

    def on_report(self, report: LoadReport, now_s: float) -> None: ...
    def decide(self, view: ClusterView, now_s: float) -> Decision | None: ...


class ClusterOperator(Protocol):
    """Changes the cluster. Errors: `ChangeError`."""

    def view(self) -> ClusterView: ...
    async def flip(self, worker: str, role: Role, revision: int = 0) -> int: ...
    async def drain(self, worker: str, revision: int = 0, deadline_s: float = 0.0) -> int: ...
    async def scale(self, pool: str, replicas: int, revision: int = 0) -> int: ...


@dataclass(slots=True)
class _Entry:
    decision: Decision
    at_s: float
    outcome: str
    new_workers: frozenset[str] = frozenset()  # if a pool grows


@dataclass(frozen=True, slots=True)
class _Backoff:
    """A pool that could not grow does not try again for `backoff_s`, until `until_s`."""

    backoff_s: float
    until_s: float


class ScalingLoop:
    """Owned by the Controller. `acts`: apply decisions rather than only log them. `limit_s`: time limit of a change."""

    def __init__(
        self, scaling_policy: ScalingPolicy, operator: ClusterOperator, period_s: float, limit_s: float, *, acts: bool
    ) -> None:
        self._scaling_policy = scaling_policy
        self._operator = operator
        self._period_s = period_s
        self._limit_s = limit_s
        self._acts = acts
        self._entries: deque[_Entry] = deque(maxlen=MAX_ENTRIES)
        self._under_way: list[_Entry] = []
        self._backoffs: dict[str, _Backoff] = {}  # by pool
        self._counts: Counter[tuple[str, str]] = Counter()
        self._task: asyncio.Task[None] | None = None

    def counts(self) -> tuple[tuple[str, str, int], ...]:
        """Decisions that were advised, done, or failed: (kind, outcome, count)."""
        return tuple((kind, outcome, count) for (kind, outcome), count in sorted(self._counts.items()))

    def start(self, failures: Failures) -> None:
        self._task = asyncio.ensure_future(supervised("scaling", self._round, failures))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def on_report(self, report: LoadReport) -> None:
        """Take a gateway's load report."""
        self._scaling_policy.on_report(report, asyncio.get_running_loop().time())

    def decisions(self) -> tuple[DecisionRecord, ...]:
        """The latest decisions, oldest first."""
        now_s = asyncio.get_running_loop().time()
        return tuple(DecisionRecord(each.decision, now_s - each.at_s, each.outcome) for each in self._entries)

    async def _round(self) -> None:
        await asyncio.sleep(self._period_s)
        await self._step(asyncio.get_running_loop().time())

    async def _step(self, now_s: float) -> None:
        last = self._entries[-1] if self._entries else None
        view = self._operator.view()
        under_way = list(self._under_way)
        for each in under_way:
            await self._follow(each, view, now_s)
        if not all(_waits_for_a_node(each, view) for each in under_way) or under_way != self._under_way:
            return
        decision = self._scaling_policy.decide(self._limited(view, now_s), now_s)
        if decision is None:
            return
        if not self._acts:
            if last is None or not _is_same(last.decision, decision):
                logger.info("advised: %s, %s", _description(decision), decision.reason, extra=_fields(decision))
                self._entries.append(_Entry(decision, now_s, ADVISED))
                self._counts[decision.kind, ADVISED] += 1
            return
        logger.info("decided: %s, %s", _description(decision), decision.reason, extra=_fields(decision))
        entry = _Entry(decision, now_s, UNDER_WAY)
        self._entries.append(entry)
        self._under_way.append(entry)
        try:
            await self._apply(entry, view)
        except ChangeError as error:
            self._close(entry, f"failed: {error}")
        except BaseException as error:
            self._close(entry, f"failed: {type(error).__name__}: {error}")
            raise

    async def _apply(self, entry: _Entry, view: ClusterView) -> None:
        decision = entry.decision
        if decision.kind == "flip":
            assert decision.role is not None, "a flip names a role"
            await self._operator.flip(decision.worker, decision.role, view.revision)
            self._close(entry, DONE)
        elif decision.kind == "shrink":
            await self._operator.drain(decision.worker, view.revision)
        else:
            wanted = next((pool.wanted for pool in view.pools if pool.name == decision.pool), 0)
            await self._operator.scale(decision.pool, wanted + 1, view.revision)
            before = {worker.name for worker in view.workers}
            entry.new_workers = frozenset(worker.name for worker in self._operator.view().workers) - before

    def _limited(self, view: ClusterView, now_s: float) -> ClusterView:
        """The view, in which pools that wait for a node, or recently failed to grow, are at their maximum."""
        full = {entry.decision.pool for entry in self._under_way}
        full |= {pool for pool, backoff in self._backoffs.items() if now_s < backoff.until_s}
        pools = (replace(pool, max_replicas=pool.wanted) if pool.name in full else pool for pool in view.pools)
        return replace(view, pools=tuple(pools)) if full else view

    async def _follow(self, entry: _Entry, view: ClusterView, now_s: float) -> None:
        """Close the entry if its change is over."""
        workers = {worker.name: worker for worker in view.workers}
        if entry.decision.kind == "shrink":
            outcome = "" if entry.decision.worker in workers else DONE
        else:
            new = [workers[name] for name in entry.new_workers if name in workers]
            detail = next((worker.detail for worker in new if worker.detail), "")
            if all(worker.state is WorkerState.READY for worker in new):
                outcome = DONE if new else "failed: it was removed again"
            else:
                outcome = f"failed: {detail}" if detail else ""
        if not outcome and now_s - entry.at_s > self._limit_s:
            outcome = f"failed: it was not over after {self._limit_s:.0f} s"
        if outcome == DONE:
            self._backoffs.pop(entry.decision.pool, None)
            self._close(entry, outcome)
        elif outcome and entry.decision.kind == "grow":
            backoff_s = self._back_off(entry.decision.pool, now_s)
            self._close(entry, f"{outcome}; the pool does not grow by itself for {backoff_s:.0f} s")
            await self._remove(entry.new_workers & workers.keys())
        elif outcome:
            self._close(entry, outcome)

    def _back_off(self, pool: str, now_s: float) -> float:
        before = self._backoffs.get(pool)
        backoff_s = GROW_AGAIN_S if before is None else min(2 * before.backoff_s, MAX_GROW_AGAIN_S)
        self._backoffs[pool] = _Backoff(backoff_s, now_s + backoff_s)
        return backoff_s

    async def _remove(self, new_workers: Collection[str]) -> None:
        for name in sorted(new_workers):
            try:
                await self._operator.drain(name)
            except ChangeError as error:
                logger.warning("%s could not be removed: %s", name, error)

    def _close(self, entry: _Entry, outcome: str) -> None:
        entry.outcome = outcome
        self._counts[entry.decision.kind, DONE if outcome == DONE else "failed"] += 1
        self._under_way.remove(entry)
        level = logging.INFO if outcome == DONE else logging.WARNING
        logger.log(level, "%s: %s", _description(entry.decision), outcome, extra=_fields(entry.decision))


def _waits_for_a_node(entry: _Entry, view: ClusterView) -> bool:
    return any(worker.name in entry.new_workers and worker.waits_for for worker in view.workers)


def _is_same(one: Decision, other: Decision) -> bool:
    """Whether two decisions are equal, apart from the figures in their reasons."""
    return (one.kind, one.worker, one.role, one.pool) == (other.kind, other.worker, other.role, other.pool)


def _fields(decision: Decision) -> dict[str, Any]:
    role = decision.role.value if decision.role else None
    named = {"kind": decision.kind, "worker": decision.worker, "role": role, "pool": decision.pool}
    return log_fields("controller", **{name: value for name, value in named.items() if value})


def _description(decision: Decision) -> str:
    if decision.kind == "flip":
        return f"{decision.worker}: role set to {decision.role.value if decision.role else 'none'}"
    if decision.kind == "grow":
        return f"{decision.pool}: one worker more"
    return f"{decision.pool}: one worker fewer, {decision.worker} drains"
