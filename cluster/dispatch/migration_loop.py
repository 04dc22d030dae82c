"""Runs the migrations and requeues that the policies plan, periodically and when the membership changes.

The policies are `cluster.policy.scaling.migrations` and `requeue`. Knows requests by their keys only.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from cluster.control.supervision import Failures, supervised
from cluster.policy.scaling.migrations import MigrationPlanner, Move
from cluster.policy.scaling.requeue import Requeue
from diptych.view import ClusterView
from workers.log_fields import log_fields

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MAX_REPLACED = 16  # attempts per round


class MigrationLoop:
    """Owned by a Dispatcher. `start` before use, `close` after.

    `contexts` returns the tokens so far of each running decode. `move` migrates one to another worker. `replace`
    replaces an attempt whose prompt still waits by one on better workers, if there are any.
    """

    def __init__(
        self,
        planner: MigrationPlanner,
        requeue: Requeue,
        routing_view: Callable[[], ClusterView],
        change: Callable[[], Awaitable[object]],
        contexts: Callable[[], Mapping[str, int]],
        move: Callable[[str, str], Awaitable[bool]],
        replace: Callable[[str], bool],
    ) -> None:
        self._planner = planner
        self._requeue = requeue
        self._routing_view = routing_view
        self._change = change
        self._contexts = contexts
        self._move = move
        self._replace = replace
        self._under_way: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._round_due = asyncio.Event()
        self._may_move = True  # as far as known
        self._counts: Counter[tuple[str, str]] = Counter()

    def counts(self) -> tuple[tuple[str, str, int], ...]:
        """Migrations and requeues: (reason, outcome, count)."""
        return tuple((kind, outcome, count) for (kind, outcome), count in sorted(self._counts.items()))

    def start(self, failures: Failures) -> None:
        self._task = asyncio.ensure_future(supervised("planning moves", self._step, failures))

    async def close(self) -> None:
        """Cancel running migrations: their requests stay where they are."""
        tasks = [*self._under_way, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _step(self) -> None:
        """Start a round after a change of the membership, after the last running migration, or, while any can follow
        without these, after `PERIOD_S`.
        """
        self._round_due.clear()
        either: set[asyncio.Future[object]] = {
            asyncio.ensure_future(self._round_due.wait()),
            asyncio.ensure_future(self._change()),
        }
        try:
            timeout_s = PERIOD_S if self._may_move else None
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in either:
                each.cancel()
        self.round()

    def round(self) -> None:
        """Start the migrations and requeues that the policies plan now."""
        routing_view, now_s = self._routing_view(), asyncio.get_running_loop().time()
        self._may_move = self._planner.may_move(routing_view) or self._requeue.is_on
        for move in self._planner.plan(routing_view, self._contexts, now_s):
            task = asyncio.ensure_future(self._migrate(move))
            self._under_way.add(task)
            task.add_done_callback(self._ended)
        left = MAX_REPLACED
        for keys in self._requeue.candidates(routing_view, now_s):
            for key in keys[:left]:
                left -= 1
                if not self._replace(key):
                    break
                self._counts["requeue", "moved"] += 1

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """After the last running migration, start the next round."""
        self._under_way.discard(task)
        if not (self._under_way or task.cancelled()):
            self._round_due.set()

    async def _migrate(self, move: Move) -> None:
        moved = False
        try:
            moved = await self._move(move.key, move.target)
        except Exception:
            logger.exception("%s stays on %s", move.key, move.source, extra=log_fields(key=move.key))
        finally:
            self._planner.ended(move, asyncio.get_running_loop().time(), moved=moved)
            self._counts[move.kind, "moved" if moved else "stayed"] += 1
            outcome = "moved" if moved else "could not move"
            extra = log_fields(key=move.key, source=move.source, target=move.target)
            args = move.key, outcome, move.source, move.target, move.reason
            logger.info("%s %s from %s to %s: %s", *args, extra=extra)
