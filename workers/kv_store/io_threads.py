"""Threads for blocking I/O, each with a buffer of its own, and copies that leave the caller's memory at a deadline."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np

from workers.kv_store.health import StoreHealth
from workers.kv_store.slab import aligned_buffer

READ_THREADS = 4
WRITE_THREADS = 2
MAX_READS = 256  # that wait for a thread
MAX_WRITES = 64
CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class IOOutcome(Enum):
    """The outcome of a job on a thread."""

    GOOD = "good"
    MISS = "miss"  # a server has no such key
    LATE = "late"  # its deadline passed before it was the job's turn, or while it read
    CORRUPT = "corrupt"  # the slot, or the server, has something else
    FAILED = "failed"


class IOResult(NamedTuple):
    """`why` it failed. `found`: blocks that a server has. `prefix`: of the block that was read."""

    outcome: IOOutcome
    why: str = ""
    found: int = 0
    prefix: int | None = None


GOOD, MISS, LATE, CORRUPT = map(IOResult, (IOOutcome.GOOD, IOOutcome.MISS, IOOutcome.LATE, IOOutcome.CORRUPT))


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


class BlockCopies:
    """A store's copies in progress that are in time. `late`: how many were not. Used on the event loop."""

    def __init__(self) -> None:
        self.late = 0
        self._in_time: dict[BlockCopy, tuple[StoreHealth, int]] = {}  # -> `answers` at its begin

    def __len__(self) -> int:
        return len(self._in_time)

    def begin(self, health: StoreHealth, timeout_s: float) -> BlockCopy:
        copy = BlockCopy(timeout_s, self._is_late)
        self._in_time[copy] = health, health.answers
        return copy

    def ended(self, copy: BlockCopy, result: IOResult) -> bool:
        """Whether it was in time. Its result then tells whether the device or the server works."""
        health, _ = self._in_time.pop(copy, (None, 0))
        if health is None:
            return False
        if result.outcome is IOOutcome.FAILED:
            health.failed(result.why)
        elif result is not LATE:
            health.succeeded()
        return True

    def _is_late(self, copy: BlockCopy) -> None:
        """A deadline has passed. The device or the server is at fault only if it answered nothing meanwhile."""
        self.late += 1
        health, answers = self._in_time.pop(copy)
        if health.answers == answers:
            health.failed("no answer in time")

    def finish(self) -> None:
        """End all of them without success."""
        for copy in list(self._in_time):
            copy.finish(False)
