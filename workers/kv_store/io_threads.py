"""Threads for blocking I/O, each with a buffer of its own, and copies that leave the caller's memory at a deadline."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from workers.kv_store.slab import aligned_buffer

T = TypeVar("T")


class IOThreads:
    """Owned by a KVStore, which closes it. Runs at most `count` jobs at a time; `most` wait."""

    def __init__(self, name: str, count: int, most: int, buffer_bytes: int) -> None:
        self._most = most
        self._queue: SimpleQueue[Callable[[memoryview], None] | None] = SimpleQueue()
        # Daemons, so that a read that never returns does not keep the process from exiting.
        self._threads = [
            threading.Thread(target=self._run, args=(aligned_buffer(buffer_bytes),), name=name, daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_full(self) -> bool:
        return self._queue.qsize() >= self._most

    def submit(self, work: Callable[[memoryview], T], ended: Callable[[T], None]) -> None:
        """Run `work`, which raises nothing, on a thread with its buffer; then `ended` gets the result on this loop.

        The caller has checked `is_full`, or bounds these jobs otherwise.
        """
        loop = asyncio.get_running_loop()

        def job(buffer: memoryview) -> None:
            result = work(buffer)
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(ended, result)

        self._queue.put(job)

    def stop(self) -> None:
        """Let the jobs that wait run, then end."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self, deadline_s: float) -> bool:
        """After `stop`: whether all threads have ended by this `time.monotonic()`. Blocks."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, buffer: memoryview) -> None:
        while (job := self._queue.get()) is not None:
            job(buffer)


class BlockCopy:
    """One read or write, which moves a block between a thread's buffer and the caller's memory.

    `done` is True if it succeeded, and False at its deadline at the latest. The caller's memory is not used once it is
    done, even if the I/O never returns. `late` is called at the deadline.
    """

    def __init__(self, timeout_s: float, late: Callable[["BlockCopy"], None]) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[bool] = loop.create_future()
        self.is_over = False
        self._lock = threading.Lock()  # held while copying, which takes well under a millisecond
        self._late = late
        self._timer = loop.call_later(timeout_s, self._expire)

    def copy(self, source: memoryview, target: memoryview) -> bool:
        """On the I/O thread. False: too late, nothing was copied."""
        with self._lock:
            if not self.is_over:
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL
            return not self.is_over

    def finish(self, good: bool) -> None:
        """On the event loop."""
        with self._lock:
            self.is_over = True
        self._timer.cancel()
        if not self.done.done():
            self.done.set_result(good)

    def _expire(self) -> None:
        self.finish(False)
        self._late(self)
