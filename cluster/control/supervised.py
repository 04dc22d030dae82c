"""Background tasks that survive exceptions: it logs and counts each, and continues after a pause."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


class Failures:
    """How often each background task of a process failed. `changed` is called after each failure."""

    def __init__(self, changed: Callable[[], object] = lambda: None) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = changed

    def count(self, task: str) -> None:
        self._counts[task] += 1
        self._changed()

    def counts(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(self._counts.items()))


async def supervised(
    task: str,
    work: Callable[[], Awaitable[None]],
    failures: Failures,
    *,
    pause_s: float = PAUSE_S,
    max_pause_s: float = MAX_PAUSE_S,
) -> None:
    """Call `work` in a loop until cancelled. `work` itself waits until it has something to do.

    Pauses for `pause_s` after an exception, and twice as long after each further one in a row, at most `max_pause_s`.
    A call that returns, or that ran for longer than `max_pause_s`, resets the pause.
    """
    clock = asyncio.get_running_loop().time
    in_a_row = 0
    while True:
        begun_s = clock()
        try:
            await work()
            in_a_row = 0
        except Exception as error:
            in_a_row = 0 if clock() - begun_s > max_pause_s else in_a_row
            wait_s = min(max_pause_s, pause_s * 2 ** min(in_a_row, 30))
            in_a_row += 1
            logger.exception("%s failed (%s); it continues in %.0f s", task, type(error).__name__, wait_s)
            failures.count(task)
            await asyncio.sleep(wait_s)
