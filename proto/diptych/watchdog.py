"""Timeouts that count only the time in which this event loop ran.

When the loop was blocked, stopped or starved, its timers are overdue while the messages of its peers are unread, and a
plain timer would blame the peers. A watchdog splits its timeout into ticks. Each tick counts once, however late it is,
and the loop reads arrived messages between two ticks. Shared by client, workers and cluster.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TICKS = 8  # the loop needs a few iterations to read a message; it gets this many, however slow they are


class Watchdog:
    """Calls `expired` once, when `reset` was not called for `seconds`; at most one tick (an eighth) late.

    Must be closed: its timer keeps it alive. `shares_ticks`: all with the same timeout tick together, and a thousand
    wake the loop as often as one.
    """

    def __init__(self, seconds: float, expired: Callable[[], object], *, shares_ticks: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = seconds / TICKS
        self._expired = expired
        self._shares_ticks = shares_ticks
        self._number = 0  # of the next shared tick
        self._left = TICKS + shares_ticks  # the present shared tick does not count
        self._timer: asyncio.TimerHandle | None = self._next()

    def reset(self) -> None:
        """Restart the timeout. Costs one assignment."""
        self._left = TICKS + 1  # the current tick does not count

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self) -> asyncio.TimerHandle:
        if not self._shares_ticks:
            return self._loop.call_later(self._tick_s, self._tick)
        self._number = max(self._number, int(self._loop.time() / self._tick_s)) + 1
        return self._loop.call_at(self._number * self._tick_s, self._tick)

    def _tick(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._timer = self._next()
        else:
            self._timer = None
            self._expired()


@asynccontextmanager
async def patient_timeout(seconds: float, *, shares_ticks: bool = False) -> AsyncIterator[Watchdog]:
    """`asyncio.timeout` with a watchdog, which it yields. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        watchdog = Watchdog(seconds, lambda: bound.reschedule(loop.time()), shares_ticks=shares_ticks)
        try:
            yield watchdog
        finally:
            watchdog.close()
