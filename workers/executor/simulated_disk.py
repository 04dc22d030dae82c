"""A disk of a simulated worker: a real slot index with real hashes, simulated seconds, no bytes. Empty at each start.

Each thread reads or writes one block at a time, with its share of the disk's speed. Reads and writes do not slow each
other down. Queues and deadlines are those of a `KVStore`.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from workers.engine.kv_event_log import Tier
from workers.kv_store.io_threads import MAX_READS, MAX_WRITES, READ_THREADS, WRITE_THREADS
from workers.kv_store.kv_store import WRITE_TIMEOUT_S
from workers.kv_store.slot_index import SlotIndex
from workers.stats import TierStats


class SimulatedJobs:
    """At most `most` at once. `end_s(now, deadline)`: when a job that begins now ends."""

    def __init__(self, most: int, end_s: Callable[[float, float], float]) -> None:
        self._most = most
        self._end_s = end_s
        self._jobs: dict[int, tuple[asyncio.TimerHandle, Callable[[bool], None]]] = {}
        self._number = 0
        self.late = 0

    @property
    def is_full(self) -> bool:
        return len(self._jobs) >= self._most

    def submit(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        """`done` gets whether the job has ended within its timeout, at that time."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        deadline_s = now_s + timeout_s
        end_s = self._end_s(now_s, deadline_s)
        self._number += 1
        timer = loop.call_at(min(end_s, deadline_s), self._end, self._number, end_s <= deadline_s)
        self._jobs[self._number] = timer, done

    def _end(self, number: int, in_time: bool) -> None:
        self.late += not in_time
        _, done = self._jobs.pop(number)
        done(in_time)

    def close(self) -> None:
        """End what is in progress without success."""
        for timer, done in list(self._jobs.values()):
            timer.cancel()
            done(False)
        self._jobs.clear()


class _Threads:
    """Each of these does one job after the other, `seconds` each."""

    def __init__(self, num_threads: int, seconds: float) -> None:
        self._free_s = [0.0] * num_threads  # a heap: when each thread is free
        self._seconds = seconds

    def end_s(self, now_s: float, deadline_s: float) -> float:
        begin_s = max(now_s, self._free_s[0])
        if begin_s < deadline_s:
            heapq.heapreplace(self._free_s, begin_s + self._seconds)
        return begin_s + self._seconds


class SimulatedDisk:
    """A `BlockStore`. Owned by a SimulatedExecutor, which closes it.

    `speed`: bytes per second, of all threads together. `host`: what is in host blocks, if the executor knows it.
    """

    tier = Tier.DISK
    shared_as = ""

    def __init__(
        self, size_bytes: int, block_bytes: int, speed: int, host: dict[int, Any], changed: Callable[[], None]
    ) -> None:
        self.read_byte_s = 1 / speed
        self._block_bytes = block_bytes
        self._index = SlotIndex(size_bytes // block_bytes)
        readers, writers = (_Threads(count, count * block_bytes / speed) for count in (READ_THREADS, WRITE_THREADS))
        self._readers = SimulatedJobs(READ_THREADS + MAX_READS, readers.end_s)
        self._writers = SimulatedJobs(WRITE_THREADS + MAX_WRITES, writers.end_s)
        self._host = host
        self._content: dict[bytes, Any] = {}  # of blocks, where `host` has it
        self._changed = changed
        self._gone: Callable[[bytes], object] = len
        self._unwanted: set[bytes] = set()  # being written, but to be forgotten
        self._num_read = self._num_written = self._num_dropped = 0

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        self._gone = gone
        return {}

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        found(self._index.match(hashes))

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        if block_hash in self._index or self._index.is_writing(block_hash):
            asyncio.get_running_loop().call_soon(done, block_hash in self._index)
            return
        reserved = None if self._writers.is_full else self._index.reserve(block_hash)
        if reserved is None:
            self._num_dropped += 1
            asyncio.get_running_loop().call_soon(done, False)
            return
        if reserved.gone is not None:
            self._forget(reserved.gone)
        self._writers.submit(WRITE_TIMEOUT_S, partial(self._written, block_hash, self._host.get(block), done))

    def _written(self, block_hash: bytes, content: Any, done: Callable[[bool], None], in_time: bool) -> None:
        is_wanted = block_hash not in self._unwanted
        self._unwanted.discard(block_hash)
        self._num_written += in_time
        if in_time and is_wanted:
            self._index.publish(block_hash)
            if content is not None:
                self._content[block_hash] = content
        else:
            self._index.unpin(self._index.abandon(block_hash))
        done(in_time and is_wanted)

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        slot = None if self._readers.is_full else self._index.pin(block_hash)
        begun_s = asyncio.get_running_loop().time()

        def end(in_time: bool) -> None:
            if slot is not None:
                self._index.unpin(slot)
            self._num_read += in_time
            if in_time and block_hash in self._content:
                self._host[block] = self._content[block_hash]
            done(in_time, asyncio.get_running_loop().time() - begun_s)
            self._changed()

        if slot is None:
            asyncio.get_running_loop().call_soon(end, False)
        else:
            self._readers.submit(timeout_s, end)

    def forget(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            slot = self._index.forget(block_hash)
            if slot is not None:
                self._index.unpin(slot)
                self._forget(block_hash)
            elif self._index.is_writing(block_hash):
                self._unwanted.add(block_hash)

    def _forget(self, block_hash: bytes) -> None:
        self._content.pop(block_hash, None)
        self._gone(block_hash)

    def stats(self) -> TierStats:
        size = self._block_bytes
        return TierStats(
            self.tier.value,
            blocks=len(self._index),
            capacity_blocks=self._index.num_slots,
            block_bytes=size,
            read_bytes=self._num_read * size,
            written_bytes=self._num_written * size,
            dropped_blocks=self._num_dropped,
            late=self._readers.late + self._writers.late,
        )

    def close(self) -> None:
        """End what is in progress without success."""
        self._changed = lambda: None
        for threads in (self._readers, self._writers):
            threads.close()
