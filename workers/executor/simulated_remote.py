"""A server of KV blocks for simulated workers, which share its memory and its network: real hashes, simulated seconds.

Each direction of its network sends one block after another, for all workers together. Empty at the start.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from workers.engine.kv_event_log import Tier
from workers.executor.simulated_disk import SimulatedJobs
from workers.kv_store.io_threads import MAX_READS, MAX_WRITES, READ_THREADS, WRITE_THREADS
from workers.kv_store.known_blocks import KnownBlocks
from workers.kv_store.kv_store import WRITE_TIMEOUT_S
from workers.stats import TierStats

ROUND_TRIP_S = 0.0005


class _Stored(NamedTuple):
    num_bytes: int
    prefix: int | None  # the prefix hash that ends with the block
    content: Any  # if the workers know it


class _Direction:
    """Of the server's network. `byte_s`: seconds for a byte."""

    def __init__(self, byte_s: float) -> None:
        self._byte_s = byte_s
        self._free_s = 0.0

    def end_s(self, num_bytes: int, now_s: float, deadline_s: float) -> float:
        begin_s = max(now_s, self._free_s)
        end_s = begin_s + num_bytes * self._byte_s
        if begin_s < deadline_s:
            self._free_s = end_s
        return end_s + ROUND_TRIP_S


class SimulatedRemoteServer:
    """Shared by the workers of a simulation. It keeps `size_bytes` of KV: the least recently used leaves.

    `speed`: bytes per second in each direction.
    """

    def __init__(self, size_bytes: int, speed: int) -> None:
        self.read_byte_s = 1 / speed
        self.sends, self.receives = _Direction(1 / speed), _Direction(1 / speed)
        self._blocks: OrderedDict[tuple[str, bytes], _Stored] = OrderedDict()  # least recently used first
        self._free_bytes = size_bytes

    def get(self, key: tuple[str, bytes]) -> _Stored | None:
        found = self._blocks.get(key)
        if found is not None:
            self._blocks.move_to_end(key)
        return found

    def set(self, key: tuple[str, bytes], block: _Stored) -> None:
        self.delete(key)
        self._blocks[key] = block
        self._free_bytes -= block.num_bytes
        while self._free_bytes < 0:
            self.delete(next(iter(self._blocks)))

    def delete(self, key: tuple[str, bytes]) -> None:
        block = self._blocks.pop(key, None)
        self._free_bytes += 0 if block is None else block.num_bytes


class SimulatedRemote:
    """A `BlockStore`. Owned by a SimulatedExecutor, which closes it.

    `shared_as`: what the keys of its blocks begin with. `host`: what is in host blocks, if the executor knows it.
    """

    tier = Tier.REMOTE

    def __init__(
        self,
        server: SimulatedRemoteServer,
        shared_as: str,
        block_bytes: int,
        host: dict[int, Any],
        changed: Callable[[], None],
    ) -> None:
        self.shared_as = shared_as
        self.read_byte_s = server.read_byte_s
        self._server = server
        self._block_bytes = block_bytes
        self._asks = SimulatedJobs(MAX_READS, lambda now_s, deadline_s: now_s + ROUND_TRIP_S)
        self._reads = SimulatedJobs(READ_THREADS + MAX_READS, partial(server.sends.end_s, block_bytes))
        self._writes = SimulatedJobs(WRITE_THREADS + MAX_WRITES, partial(server.receives.end_s, block_bytes))
        self._host = host
        self._changed = changed
        self._known = KnownBlocks()
        self._added: Callable[[bytes, int], object] = lambda block_hash, prefix: None
        self._unwanted: dict[bytes, bool] = {}  # being written -> to be forgotten
        self._num_read = self._num_written = self._num_dropped = 0

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        self._added, self._known.gone = added, gone
        return {}

    def _key(self, block_hash: bytes) -> tuple[str, bytes]:
        return self.shared_as, block_hash

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        def end(in_time: bool) -> None:
            absent = (place for place, each in enumerate(hashes) if self._server.get(self._key(each)) is None)
            count = next(absent, len(hashes)) if in_time else 0
            if in_time and count < len(hashes):
                self._known.lost(hashes[count])
            found(count)
            self._changed()

        if not hashes or self._asks.is_full:
            found(0)
        else:
            self._asks.submit(timeout_s, end)

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        is_there = block_hash in self._known or self._server.get(self._key(block_hash)) is not None
        if is_there or block_hash in self._unwanted or self._writes.is_full:
            if is_there:
                self._known.found(block_hash)
            self._num_dropped += not is_there and block_hash not in self._unwanted
            asyncio.get_running_loop().call_soon(done, is_there)
            return
        self._unwanted[block_hash] = False
        stored = _Stored(self._block_bytes, prefix, self._host.get(block))
        self._writes.submit(WRITE_TIMEOUT_S, partial(self._written, block_hash, stored, done))

    def _written(self, block_hash: bytes, stored: _Stored, done: Callable[[bool], None], in_time: bool) -> None:
        is_there = not self._unwanted.pop(block_hash) and in_time
        self._num_written += in_time
        if is_there:
            self._server.set(self._key(block_hash), stored)
            self._known.found(block_hash)
        done(is_there)

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        begun_s = asyncio.get_running_loop().time()

        def end(in_time: bool) -> None:
            stored = self._server.get(self._key(block_hash)) if in_time else None
            self._num_read += stored is not None
            if stored is None:
                self._known.lost(block_hash)
            else:
                if stored.content is not None:
                    self._host[block] = stored.content
                if stored.prefix is not None and block_hash not in self._known:
                    self._added(block_hash, stored.prefix)
                self._known.found(block_hash)
            done(stored is not None, asyncio.get_running_loop().time() - begun_s)
            self._changed()

        if self._reads.is_full:
            asyncio.get_running_loop().call_soon(end, False)
        else:
            self._reads.submit(timeout_s, end)

    def forget(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self._known.lost(block_hash)
            self._server.delete(self._key(block_hash))
            if block_hash in self._unwanted:
                self._unwanted[block_hash] = True

    def stats(self) -> TierStats:
        size = self._block_bytes
        return TierStats(
            self.tier.value,
            blocks=len(self._known),
            block_bytes=size,
            read_bytes=self._num_read * size,
            written_bytes=self._num_written * size,
            dropped_blocks=self._num_dropped,
            late=self._reads.late + self._writes.late,
        )

    def close(self) -> None:
        """End what is in progress without success."""
        self._changed = lambda: None
        for jobs in (self._asks, self._reads, self._writes):
            jobs.close()
