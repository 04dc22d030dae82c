"""The processes and the time that an answer may take. Knows nothing of what is computed.

main thread       waits for the search, draws progress, watches the clock and Ctrl-C
search's thread   asks for runs through `each`; once the time is up, `each` raises `TimeUp`
processes         simulate; each ends by itself when this process closes the pipe, or dies
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

from cluster.offline.scoring.goodput import TimeUp

T = TypeVar("T")

TICK_S = 0.25  # between two looks at the clock
LIMIT = "the time limit"
INTERRUPT = "Ctrl-C"


class Budget:
    """At most `limit_s` seconds from now on so many processes. Use as a context: its end ends the processes.

    `ended_by` is empty while there is time, then says what ended it.
    """

    def __init__(self, limit_s: float, processes: int) -> None:
        self.limit_s = limit_s
        self.ended_by = ""
        self._begun_s = time.monotonic()
        context = get_context("spawn")
        followed, self._alive = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(processes, context, initializer=_follow, initargs=(followed,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._alive.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def left_s(self) -> float:
        return max(0.0, self._begun_s + self.limit_s - time.monotonic())

    def past(self, share: float) -> bool:
        """Whether so much of the time has gone: for steps that must leave time to others."""
        return self.left_s <= (1.0 - share) * self.limit_s

    def each(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        """As the builtin `map`, in the processes. Raises `TimeUp` once the time is up, and what `work` raises."""
        return self._results([self._submit(work, *each) for each in zip(*arguments, strict=False)])

    def _submit(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        try:
            return self._pool.submit(work, *arguments)
        except (BrokenExecutor, RuntimeError):
            if self.ended_by:
                raise TimeUp from None
            raise

    def _results(self, futures: "list[Future[Any]]") -> Iterator[Any]:
        try:
            for future in futures:
                yield future.result()
        except (BrokenExecutor, CancelledError):
            if self.ended_by:
                raise TimeUp from None
            raise

    def end(self, ended_by: str) -> None:
        """Whatever is being computed is lost."""
        if not self.ended_by:
            self.ended_by = ended_by
            self._alive.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def run(self, search: Callable[[], T], tick: Callable[[float], None] = lambda left_s: None) -> T:
        """What the search answers, in a thread of its own; `tick` hears the seconds that are left."""
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


def _follow(alive: Connection) -> None:
    """In a process of the pool: Ctrl-C is the parent's, and without the parent's end of the pipe there is no work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end() -> None:
        with suppress(EOFError, OSError):
            alive.recv_bytes()
        os._exit(0)

    threading.Thread(target=end, name="follow", daemon=True).start()
