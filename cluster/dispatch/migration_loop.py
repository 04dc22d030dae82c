"""Runs the migrations and requeues that the policies plan, periodically and when the membership changes.

The policies are `cluster.policy.scaling.migrations` and `requeue`. Knows requests by their keys only.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from cluster.control.supervised import Failures, supervised
from cluster.policy.scaling.migrations import MigrationPlanner, Move
from cluster.policy.scaling.requeue import Requeue
from diptych.view import ClusterView
from workers.log_fields import log_fields

logger = logging.getLogger(__name__)

LOOK_S = 1.0
MAX_REPLACED = 16  # prompts per look


class MigrationLoop:
    """Owned by a Dispatcher. `start` before use, `close` after.

    `contexts` returns the tokens so far of each running decode. `move` migrates one to another worker. `replace`
    replaces an attempt whose prompt waits by one on better workers, if there are any.
    """

    def __init__(
        self,
        mover: MigrationPlanner,
        requeue: Requeue,
        picture: Callable[[], ClusterView],
        change: Callable[[], Awaitable[object]],
        contexts: Callable[[], Mapping[str, int]],
        move: Callable[[str, str], Awaitable[bool]],
        replace: Callable[[str], bool],
    ) -> None:
        self._migration_planner = mover
        self._requeue = requeue
        self._picture = picture
        self._change = change
        self._contexts = contexts
        self._move = move
        self._replace = replace
        self._under_way: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._looking = asyncio.Event()
        self._counts: Counter[tuple[str, str]] = Counter()

    def counts(self) -> tuple[tuple[str, str, int], ...]:
        """Moves by reason and outcome: (reason, outcome, count)."""
        return tuple((kind, outcome, count) for (kind, outcome), count in sorted(self._counts.items()))

    def start(self, failures: Failures) -> None:
        self._following = asyncio.ensure_future(supervised("planning moves", self._follow, failures))

    async def close(self) -> None:
        """Cancel running migrations: their requests stay where they are."""
        tasks = [*self._under_way, *([self._following] if self._following else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self) -> None:
        await self._wait_for_occasion()
        self.look()

    async def _wait_for_occasion(self) -> None:
        """Until the membership changes, all migrations have ended, or `LOOK_S` has passed."""
        self._looking.clear()
        either: set[asyncio.Future[object]] = {
            asyncio.ensure_future(self._looking.wait()),
            asyncio.ensure_future(self._change()),
        }
        try:
            await asyncio.wait(either, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in either:
                each.cancel()

    def look(self) -> None:
        """Start the migrations and requeues that are planned now."""
        contexts, now_s = self._contexts(), asyncio.get_running_loop().time()
        if contexts:
            for move in self._migration_planner.plan(self._picture(), contexts, now_s):
                task = asyncio.ensure_future(self._migrate(move))
                self._under_way.add(task)
                task.add_done_callback(self._ended)
        left = MAX_REPLACED
        for keys in self._requeue.candidates(self._picture(), now_s):
            for key in keys[:left]:
                left -= 1
                if not self._replace(key):
                    break
                self._counts["anew", "moved"] += 1

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """After the last of a batch, plan the next ones."""
        self._under_way.discard(task)
        if not (self._under_way or task.cancelled()):
            self._looking.set()

    async def _migrate(self, move: Move) -> None:
        moved = False
        try:
            moved = await self._move(move.key, move.target)
        except Exception:
            logger.exception("%s stays on %s", move.key, move.source, extra=log_fields(key=move.key))
        finally:
            self._migration_planner.ended(move, asyncio.get_running_loop().time(), moved=moved)
            self._counts[move.kind, "moved" if moved else "stayed"] += 1
            outcome = "moved" if moved else "could not move"
            extra = log_fields(key=move.key, source=move.source, target=move.target)
            args = move.key, outcome, move.source, move.target, move.reason
            logger.info("%s %s from %s to %s: %s", *args, extra=extra)
