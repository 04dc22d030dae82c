"""Carries out what `cluster.policy.moves` finds: asks it once in a while and when somebody comes or leaves.

Knows no request and no worker; whoever owns it lends it the verbs.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from cluster.policy.moves import Move, Mover
from cluster.view import ClusterView

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class Moving:
    """Owned by a Dispatcher. `start` before use, `close` after.

    `contexts` are the tokens so far of each attempt that may be moved; `move` has another worker go on with one.
    """

    def __init__(
        self,
        mover: Mover,
        picture: Callable[[], ClusterView],
        change: Callable[[], Awaitable[object]],
        contexts: Callable[[], Mapping[str, int]],
        move: Callable[[str, str], Awaitable[bool]],
    ) -> None:
        self._mover = mover
        self._picture = picture
        self._change = change
        self._contexts = contexts
        self._move = move
        self._under_way: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._following = asyncio.ensure_future(self._follow())

    async def close(self) -> None:
        """End the moves under way: their requests stay where they are."""
        tasks = [*self._under_way, *([self._following] if self._following else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._change()
            try:
                self.look()
            except Exception:
                logger.exception("no moves could be planned; trying again")
                await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Begin what should move now."""
        contexts = self._contexts()
        if contexts:
            for move in self._mover.plan(self._picture(), contexts, asyncio.get_running_loop().time()):
                task = asyncio.ensure_future(self._carry_out(move))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)

    async def _carry_out(self, move: Move) -> None:
        moved = False
        try:
            moved = await self._move(move.key, move.target)
        finally:
            self._mover.ended(move, asyncio.get_running_loop().time(), moved=moved)
            outcome = "moved" if moved else "could not move"
            logger.info("%s %s from %s to %s: %s", move.key, outcome, move.source, move.target, move.reason)
