"""A timer that is cheap to restart: `start` and `stop` mostly cost an assignment, not a new event loop timer.

For timeouts that are nearly always stopped in time: of a step, of a heartbeat. The one loop timer behind it is armed
again when it fires too early. Knows only the loop's clock.

Source of the idea: Varghese and Lauck, Hashed and hierarchical timing wheels (SOSP'87): stopping must be cheap.
"""

import asyncio
import math
from collections.abc import Callable


class Timer:
    """Calls `expired` once when its time is up. `close` it, or its loop timer keeps it alive."""

    def __init__(self, expired: Callable[[], object]) -> None:
        self._expired = expired
        self._loop = asyncio.get_running_loop()
        self._due_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when the loop timer fires

    def start(self, seconds: float) -> None:
        """Fire in `seconds`, replacing an earlier start."""
        self._due_s = self._loop.time() + seconds
        if self._timer is None:
            self._arm()
        elif self._timer_s > self._due_s:
            self._timer.cancel()
            self._arm()

    def stop(self) -> None:
        """Do not fire until the next `start`."""
        self._due_s = math.inf

    def close(self) -> None:
        """Stop, and leave no timer behind."""
        self._due_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer_s = self._due_s
        self._timer = self._loop.call_at(self._due_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._due_s > self._timer_s:
            if self._due_s < math.inf:
                self._arm()
        else:
            self._due_s = math.inf
            self._expired()
