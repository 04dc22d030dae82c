"""Reads the KV cache events of one worker: the new ones, or the whole cache after a gap.

statistics show 17, we have 12 ──> cache_since(12) ──> events 13 to 17
a gap, or a failed call        ──> cache_since(0)  ──> the whole cache, in several replies
"""

import asyncio
import logging
from collections.abc import Callable

from cluster.runtime.interface import WorkerStub
from cluster.runtime.runtime_errors import WorkerGone
from workers.errors import WorkerError
from workers.kv_events import KVEvents

logger = logging.getLogger(__name__)

CALL_S = 10.0


class KVEventReader:
    """Owned by a WorkerClient, for one incarnation. One call at a time; rounds start `pause_s` apart."""

    def __init__(self, handle: WorkerStub, take: Callable[[KVEvents], None], pause_s: float) -> None:
        self._handle = handle
        self._take = take
        self._pause_s = pause_s
        self._number = 0  # of the newest event, by statistics
        self._last = self._reach = 0  # our position; see `KVEvents`
        self._next_s = 0.0
        self._stopped = False
        self._reading: asyncio.Task[None] | None = None

    def on_stats(self, number: int) -> None:
        """The worker's statistics show the number of its newest cache event."""
        self._number = number
        if number > self._last and self._reading is None and not self._stopped:
            self._reading = asyncio.ensure_future(self._read())
            self._reading.add_done_callback(self._done)

    def stop(self) -> None:
        """Stop reading."""
        self._stopped = True
        if self._reading is not None:
            self._reading.cancel()

    async def close(self) -> None:
        self.stop()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._reading = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("reading KV cache events failed", exc_info=error)
            self._last = self._reach = 0

    async def _read(self) -> None:
        """Read until there are no newer events. After a failure, the worker's next statistics start it again."""
        clock = asyncio.get_running_loop()
        while self._number > self._last:
            await asyncio.sleep(self._next_s - clock.time())
            self._next_s = clock.time() + self._pause_s
            try:
                async with asyncio.timeout(CALL_S):
                    await self._round()
            except (WorkerGone, WorkerError, TimeoutError) as error:
                logger.info("KV cache events did not arrive (%s); reading the whole cache next", error)
                self._last = self._reach = 0
                return

    async def _round(self) -> None:
        while True:
            events = await self._handle.cache_since(self._last, self._reach)
            if not events.whole and events.first != self._last:
                self._last = self._reach = 0  # a gap: ask for everything in the next round
                return
            self._take(events)
            self._last, self._reach = events.last, events.reach
            if self._reach >= self._last:
                return
