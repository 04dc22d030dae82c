"""What one worker has cached, read from it by number: what is new, or everything when something was missed.

    statistics say 17, we have 12 ──> cache_since(12) ──> events 13 to 17
    a gap, a call that failed         ──> cache_since(0)  ──> everything, in as many answers as it takes

Knows no policy: whoever keeps an index takes the news.
"""

import asyncio
import logging
from collections.abc import Callable

from cluster.runtime.errors import WorkerGone
from cluster.runtime.interface import WorkerHandle
from workers.errors import WorkerError
from workers.kv_events import KVEvents

logger = logging.getLogger(__name__)

CALL_S = 10.0


class CacheReader:
    """Owned by a WorkerClient, for one incarnation. One call at a time; rounds begin `pause_s` apart."""

    def __init__(self, handle: WorkerHandle, take: Callable[[KVEvents], None], pause_s: float) -> None:
        self._handle = handle
        self._take = take
        self._pause_s = pause_s
        self._number = 0  # the newest event that statistics showed
        self._last = self._reach = 0  # where we stand, as `KVEvents` has it
        self._next_s = 0.0
        self._stopped = False
        self._reading: asyncio.Task[None] | None = None

    def on_news(self, number: int) -> None:
        """The worker's statistics say that this is the newest event of its cache."""
        self._number = number
        if number > self._last and self._reading is None and not self._stopped:
            self._reading = asyncio.ensure_future(self._read())
            self._reading.add_done_callback(self._done)

    def stop(self) -> None:
        """Nothing is taken any more from now on."""
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
            logger.error("reading the news of a cache", exc_info=error)
            self._last = self._reach = 0

    async def _read(self) -> None:
        """Until nothing is new. After a failure, again with the worker's next statistics."""
        clock = asyncio.get_running_loop()
        while self._number > self._last:
            await asyncio.sleep(self._next_s - clock.time())
            self._next_s = clock.time() + self._pause_s
            try:
                async with asyncio.timeout(CALL_S):
                    await self._round()
            except (WorkerGone, WorkerError, TimeoutError) as error:
                logger.info("the news of a cache did not come (%s); all of it is asked for next", error)
                self._last = self._reach = 0
                return

    async def _round(self) -> None:
        while True:
            news = await self._handle.cache_since(self._last, self._reach)
            if not news.whole and news.first != self._last:
                self._last = self._reach = 0  # a gap: ask for everything in the next round
                return
            self._take(news)
            self._last, self._reach = news.last, news.reach
            if self._reach >= self._last:
                return
