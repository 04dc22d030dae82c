"""A deadline that moves: setting it again costs an assignment, not a timer.

What is nearly always called off (the bound of a step, the silence of a worker, a heartbeat) is one timer of the loop
that, when it comes too early, is set anew for what is left. Knows nothing but the loop's clock.

Source of the idea: Varghese and Lauck, Hashed and hierarchical timing wheels (SOSP'87): stopping must be cheap.
"""

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls `ring` once when the time is over. Close it, or its timer keeps it alive."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._due_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when it comes

    def set(self, seconds: float) -> None:
        """Ring in so many seconds, and not when it was set to before."""
        self._due_s = self._loop.time() + seconds
        if self._timer is None:
            self._arm()
        elif self._timer_s > self._due_s:
            self._timer.cancel()
            self._arm()

    def off(self) -> None:
        """Do not ring until it is set again."""
        self._due_s = math.inf

    def close(self) -> None:
        """Off, and no timer is left."""
        self._due_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer_s = self._due_s
        self._timer = self._loop.call_at(self._due_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._due_s > self._loop.time():
            if self._due_s < math.inf:
                self._arm()
        else:
            self._due_s = math.inf
            self._ring()
