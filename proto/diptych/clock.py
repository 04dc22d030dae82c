"""The clock of durations: of reads, links, steps and requests. Knows only the running event loop."""

import asyncio
import time
from collections.abc import Callable


def now_s() -> float:
    """Seconds of the machine's monotonic clock, or of the running loop's own, if it has a `now_s`.

    Not `loop.time()`: that of uvloop, on which Ray runs actors where it is installed, has whole milliseconds and stands
    still within an iteration. Both count from the same instant, so a deadline for `call_at` may come from here.
    """
    of_loop: Callable[[], float] = getattr(asyncio.get_running_loop(), "now_s", time.monotonic)
    return of_loop()
