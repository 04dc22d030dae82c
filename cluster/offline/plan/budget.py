"""Time and processes for one answer. Knows nothing about what is computed.

main thread       waits for the search, draws progress, watches the clock and Ctrl-C
search's thread   starts runs through `each`, which raises `TimeUp` once the time is up
processes         simulate (`ProcessPool`)
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from cluster.offline.process_pool import ProcessPool
from cluster.offline.scoring.goodput import TimeUp

T = TypeVar("T")

TICK_S = 0.25  # between two looks at the clock
LIMIT = "the time limit"
INTERRUPT = "Ctrl-C"


class Budget:
    """At most `limit_s` seconds from now on, on `processes` processes. A context manager that ends them.

    `ended_by` is empty while there is time, then `LIMIT` or `INTERRUPT`.
    """

    def __init__(self, limit_s: float, processes: int) -> None:
        self.limit_s = limit_s
        self.processes = processes
        self.ended_by = ""
        self._start_s = time.monotonic()
        self._pool = ProcessPool(processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    @property
    def left_s(self) -> float:
        return max(0.0, self._start_s + self.limit_s - time.monotonic())

    def past(self, share: float) -> bool:
        """Whether this share of the time is over, for steps that must leave time to later ones."""
        return self.left_s <= (1.0 - share) * self.limit_s

    def each(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        """Like the builtin `map`, in the processes. Raises `TimeUp` once the time is up, and what `work` raises."""
        if self.ended_by:
            raise TimeUp
        with self._time_up():
            futures = [self._pool.submit(work, *each) for each in zip(*arguments, strict=False)]
        return self._results(futures)

    def _results(self, futures: list[Any]) -> Iterator[Any]:
        for future in futures:
            with self._time_up():
                result = future.result()
            yield result

    @contextmanager
    def _time_up(self) -> Iterator[None]:
        """A pool that was broken by `end` raises `TimeUp`."""
        try:
            yield
        except (BrokenExecutor, CancelledError, RuntimeError):
            if self.ended_by:
                raise TimeUp from None
            raise

    def end(self, ended_by: str) -> None:
        """Stop. Runs in progress are lost."""
        if not self.ended_by:
            self.ended_by = ended_by
            self._pool.kill()

    def run(self, search: Callable[[], T], tick: Callable[[float], None] = lambda left_s: None) -> T:
        """Run the search in its own thread and return its result. `tick` gets the seconds left, every `TICK_S`."""
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(search)
            try:
                while not wait([answer], timeout=min(TICK_S, self.left_s)).done:
                    tick(self.left_s)
                    if not self.left_s:
                        self.end(LIMIT)
                        break
            except KeyboardInterrupt:
                self.end(INTERRUPT)
            return answer.result()
