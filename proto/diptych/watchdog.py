"""Timeouts that count only the time in which this event loop ran.

When the loop was blocked, stopped or starved, its timers are overdue while the messages of its peers are unread, and a
plain timer would blame the peers. A watchdog splits its timeout into ticks. Each tick counts once, however late it is,
and the loop reads arrived messages between two ticks. Shared by client, workers and cluster.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

TICKS = 8  # the loop needs a few iterations to read a message; it gets this many, however slow they are


class _SharedTicks:
    """The ticks of all watchdogs of one loop with the same timeout: one timer, while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tick_s: float) -> None:
        self._loop = loop
        self._tick_s = tick_s
        self._number = 0  # of the next tick
        self._watchdogs: dict[Watchdog, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watchdog: "Watchdog") -> None:
        self._watchdogs[watchdog] = None
        if self._timer is None:
            self._arm()

    def remove(self, watchdog: "Watchdog") -> None:
        self._watchdogs.pop(watchdog, None)
        if self._timer is not None and not self._watchdogs:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._number = max(self._number, int(self._loop.time() / self._tick_s)) + 1
        self._timer = self._loop.call_at(self._number * self._tick_s, self._tick)

    def _tick(self) -> None:
        self._arm()
        for watchdog in tuple(self._watchdogs):
            if watchdog in self._watchdogs:  # not closed by the one before
                watchdog.tick()


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _SharedTicks]]" = WeakKeyDictionary()


class Watchdog:
    """Calls `expired` once, when `reset` was not called for `seconds`; at most one tick (an eighth) late.

    Must be closed: its timer keeps it alive. `shares_ticks`: all with the same timeout tick together, and a thousand
    cost one timer.
    """

    def __init__(self, seconds: float, expired: Callable[[], object], *, shares_ticks: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = seconds / TICKS
        self._expired = expired
        self._left = TICKS + shares_ticks  # the present shared tick does not count
        self._timer: asyncio.TimerHandle | None = None
        self._ticks: _SharedTicks | None = None
        if shares_ticks:
            every = _shared.setdefault(self._loop, {})
            self._ticks = every.get(seconds) or every.setdefault(seconds, _SharedTicks(self._loop, self._tick_s))
            self._ticks.add(self)
        else:
            self._timer = self._loop.call_later(self._tick_s, self.tick)

    def reset(self) -> None:
        """Restart the timeout. Costs one assignment."""
        self._left = TICKS + 1  # the current tick does not count

    def close(self) -> None:
        if self._ticks is not None:
            self._ticks.remove(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def tick(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.close()
            self._expired()
        elif self._ticks is None:
            self._timer = self._loop.call_later(self._tick_s, self.tick)


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
