"""Deadlines that count only the time in which this event loop ran.

A loop that was blocked, stopped or starved finds its own timers overdue and the messages of others unread, and a plain
timer then blames the others. Here the time is cut into ticks, and a tick counts once however late it comes: between two
ticks the loop reads what has arrived. Knows nothing but the loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TICKS = 8  # a message needs a few turns of the loop to be read; so many it gets, however slow each turn is


class Watchdog:
    """Calls `expired` once, when `heard` was not called for `seconds` and at most one tick (an eighth) more.

    Close it, or its timer keeps it alive.
    """

    def __init__(self, seconds: float, expired: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = seconds / TICKS
        self._expired = expired
        self._left = TICKS
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._tick_s, self._tick)

    def heard(self) -> None:
        """Start the count again. Costs an assignment."""
        self._left = TICKS + 1  # the tick under way does not count

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
        else:
            self._timer = None
            self._expired()


@asynccontextmanager
async def patient_timeout(seconds: float) -> AsyncIterator[Watchdog]:
    """`asyncio.timeout` by a watchdog: raises TimeoutError. `heard` of what it yields gives all the time again."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        watchdog = Watchdog(seconds, lambda: bound.reschedule(loop.time()))
        try:
            yield watchdog
        finally:
            watchdog.close()
