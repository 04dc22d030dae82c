"""The elastic decision's shell: hears gateways, asks the decider every period, and carries out what it decides.

One change at a time: the next question comes when the last change is over. Knows no rule; knows time from the loop.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from cluster.changes import ChangeError, Taken
from cluster.policy.evidence import Decision, Report
from cluster.spec import Role
from cluster.view import ClusterView, WorkerState

logger = logging.getLogger(__name__)

REMEMBERED = 64
ADVISED, UNDER_WAY, DONE = "advised", "under way", "done"


class Decider(Protocol):
    """Pure: time is an argument."""

    def told(self, report: Report, now_s: float) -> None: ...
    def decide(self, view: ClusterView, now_s: float) -> Decision | None: ...


class Changer(Protocol):
    """Who can change the cluster. Errors: `ChangeError`."""

    def view(self) -> ClusterView: ...
    async def flip(self, worker: str, role: Role, revision: int = 0) -> int: ...
    async def drain(self, worker: str, revision: int = 0, deadline_s: float = 0.0) -> int: ...
    async def scale(self, pool: str, replicas: int, revision: int = 0) -> int: ...


@dataclass(slots=True)
class _Entry:
    decision: Decision
    at_s: float
    outcome: str
    newcomers: frozenset[str] = frozenset()  # of a pool that grows


class Steward:
    """Owned by the Controller. `acts`: carry decisions out; else they are advice. `limit_s` bounds one change."""

    def __init__(self, decider: Decider, changer: Changer, period_s: float, limit_s: float, *, acts: bool) -> None:
        self._decider = decider
        self._changer = changer
        self._period_s = period_s
        self._limit_s = limit_s
        self._acts = acts
        self._entries: deque[_Entry] = deque(maxlen=REMEMBERED)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def told(self, report: Report) -> None:
        """What one gateway saw lately."""
        self._decider.told(report, asyncio.get_running_loop().time())

    def taken(self) -> tuple[Taken, ...]:
        """The latest decisions, the last one last."""
        now_s = asyncio.get_running_loop().time()
        return tuple(Taken(each.decision, now_s - each.at_s, each.outcome) for each in self._entries)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self._step(asyncio.get_running_loop().time())
            except Exception:  # a decision that cannot be made must not take the cluster down
                logger.exception("the roles could not be judged")

    async def _step(self, now_s: float) -> None:
        last = self._entries[-1] if self._entries else None
        view = self._changer.view()
        if last is not None and last.outcome == UNDER_WAY:
            self._follow(last, view, now_s)
            return
        decision = self._decider.decide(view, now_s)
        if decision is None:
            return
        if not self._acts:
            if last is None or not _is_same(last.decision, decision):
                logger.info("advised: %s, %s", _words(decision), decision.reason)
                self._entries.append(_Entry(decision, now_s, ADVISED))
            return
        logger.info("decided: %s, %s", _words(decision), decision.reason)
        entry = _Entry(decision, now_s, UNDER_WAY)
        self._entries.append(entry)
        try:
            await self._carry_out(entry, view)
        except ChangeError as error:
            self._close(entry, f"failed: {error}")
        except BaseException as error:
            self._close(entry, f"failed: {type(error).__name__}: {error}")
            raise

    async def _carry_out(self, entry: _Entry, view: ClusterView) -> None:
        decision = entry.decision
        if decision.kind == "flip":
            assert decision.role is not None, "a flip names a role"
            await self._changer.flip(decision.worker, decision.role, view.revision)
            self._close(entry, DONE)
        elif decision.kind == "shrink":
            await self._changer.drain(decision.worker, view.revision)
        else:
            wanted = next((pool.wanted for pool in view.pools if pool.name == decision.pool), 0)
            await self._changer.scale(decision.pool, wanted + 1, view.revision)
            there = {worker.name for worker in view.workers}
            entry.newcomers = frozenset(worker.name for worker in self._changer.view().workers) - there

    def _follow(self, entry: _Entry, view: ClusterView, now_s: float) -> None:
        """Whether the change under way is over, as far as can be seen."""
        workers = {worker.name: worker for worker in view.workers}
        if entry.decision.kind == "shrink":
            outcome = "" if entry.decision.worker in workers else DONE
        else:
            new = [workers[name] for name in entry.newcomers if name in workers]
            told = next((worker.detail for worker in new if worker.detail), "")
            if all(worker.state is WorkerState.READY for worker in new):
                outcome = DONE if new else "failed: it was taken out again"
            else:
                outcome = f"failed: {told}" if told else ""
        if not outcome and now_s - entry.at_s > self._limit_s:
            outcome = f"failed: it was not over after {self._limit_s:.0f} s"
        if outcome:
            self._close(entry, outcome)

    def _close(self, entry: _Entry, outcome: str) -> None:
        entry.outcome = outcome
        level = logging.INFO if outcome == DONE else logging.WARNING
        logger.log(level, "%s: %s", _words(entry.decision), outcome)


def _is_same(one: Decision, other: Decision) -> bool:
    """But for the figures in the reason."""
    return (one.kind, one.worker, one.role, one.pool) == (other.kind, other.worker, other.role, other.pool)


def _words(decision: Decision) -> str:
    if decision.kind == "flip":
        return f"{decision.worker} becomes a {decision.role.value if decision.role else 'nameless'} worker"
    if decision.kind == "grow":
        return f"pool {decision.pool} grows by one worker"
    return f"pool {decision.pool} lets {decision.worker} go"
