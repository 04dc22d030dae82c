"""Deadlines that count only the time in which this event loop ran.

When a loop was blocked, stopped or starved, its own timers are overdue and the messages of its peers are unread, and a
plain timer blames the peers. A watchdog splits the time into ticks. A tick counts once, however late it comes, and the
loop reads what has arrived between two ticks. Shared by client, workers and cluster; needs nothing but the loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TICKS = 8  # a message needs a few iterations of the loop to be read; it gets this many, however slow they are


class Watchdog:
    """Calls `expired` once, when `reset` was not called for `seconds`; at most one tick (an eighth) late.

    Close it, or its timer keeps it alive.
    """

    def __init__(self, seconds: float, expired: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = seconds / TICKS
        self._expired = expired
        self._left = TICKS
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._tick_s, self._tick)

    def reset(self) -> None:
        """Start the count again. Costs one assignment."""
        self._left = TICKS + 1  # the current tick does not count

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
    """`asyncio.timeout` by a watchdog: raises TimeoutError. `reset` of what it yields restarts the time."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        watchdog = Watchdog(seconds, lambda: bound.reschedule(loop.time()))
        try:
            yield watchdog
        finally:
            watchdog.close()
