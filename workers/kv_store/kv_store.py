"""KV blocks on a disk: reads and writes beside the event loop, on threads. Whatever goes wrong is a miss.

    write   reserve a slot (the block it held is gone) -> queue -> thread: copy, digest, write, tell peers -> publish
    read    pin the slot -> queue -> thread: read, compare block hash and digest, copy -> unpin
            or of a peer's slab, whose owner may reuse the slot: then another hash or digest is read

Workers share a path. Each writes to its own slab and reads all of its fingerprint. A full queue drops writes. A device
that fails or hangs several times in a row is no longer used until the store is opened again. Knows no sequence and no
tensor.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from workers.errors import KVStoreError
from workers.kv_store.abandoned import remove_abandoned
from workers.kv_store.health import KVStoreStats, StoreHealth
from workers.kv_store.io_threads import (
    CLOSE_TIMEOUT_S,
    CORRUPT,
    GOOD,
    LATE,
    MAX_READS,
    MAX_WRITES,
    READ_THREADS,
    WRITE_THREADS,
    BlockCopies,
    BlockCopy,
    IOOutcome,
    IOResult,
    IOThreads,
)
from workers.kv_store.peer_slabs import PeerSlab, PeerSlabs
from workers.kv_store.shared_index import SharedIndex, SlotContent, index_bytes, index_path
from workers.kv_store.slab import Slab, open_slab, slab_bytes
from workers.kv_store.slot_format import (
    HASH_BYTES,
    PAGE_BYTES,
    decode_header,
    encode_header,
    encode_title,
    is_intact,
)
from workers.kv_store.slot_index import SlotIndex

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 5.0


class KVStore:
    """Call it on one event loop, and close it; it then closes the slab, which may hold blocks of an earlier store.

    Opening reads the header of every slot, and what peers tell, which blocks. `found_prefixes`: what opening found,
    block hash -> prefix hash, where it has one.
    `read_byte_s`: seconds that reading a byte took at the opening, of several blocks at once.
    """

    def __init__(self, slab: Slab, fingerprint: bytes) -> None:
        self._slab = slab
        self._fingerprint = fingerprint
        self._gone: Callable[[bytes], object] = len
        found = slab.scan(lambda page: decode_header(page, fingerprint, slab.block_bytes))
        found.sort(key=lambda each: each[1].number)
        self._number = found[-1][1].number if found else 0
        self._index = SlotIndex(slab.num_slots, [(header.block_hash, slot) for slot, header in found])
        self._recovered = len(self._index)
        for slot, header in found:
            if self._index.slot_of(header.block_hash) != slot:  # an older copy, which must not come back
                slab.erase(slot)
        taken = {slot for slot, _ in found}
        free = [slot for slot in range(slab.num_slots) if slot not in taken]
        self.read_byte_s = slab.measure_reads(free, READ_THREADS)
        contents = [
            SlotContent(slot, header.block_hash, header.prefix)
            for slot, header in found
            if self._index.slot_of(header.block_hash) == slot
        ]
        self._shared = SharedIndex(index_path(slab.path), fingerprint, slab.num_slots, contents)
        self._peers = PeerSlabs(slab, fingerprint)
        prefixes = {header.block_hash: header.prefix for _, header in found if header.prefix is not None}
        self.found_prefixes = self._peers.found_prefixes | prefixes
        self._readers = IOThreads("kv-store-read", READ_THREADS, MAX_READS, slab.slot_bytes)
        self._writers = IOThreads("kv-store-write", WRITE_THREADS, MAX_WRITES, slab.slot_bytes)
        self._reads = StoreHealth("reads of the KV store", self._all_gone)
        self._writes = StoreHealth("writes of the KV store")
        self._copies = BlockCopies()
        self._unwanted: set[bytes] = set()  # being written, but to be forgotten
        self._num_read = self._num_written = self._corrupt = self._dropped = self._peer_reads = self._peer_failures = 0
        self._closed = False

    @property
    def path(self) -> Path:
        """Of its own slab."""
        return self._slab.path

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """What is stored, least recently used first."""
        return self._index.block_hashes

    def stats(self) -> KVStoreStats:
        return KVStoreStats(
            num_slots=self._index.num_slots,
            num_stored=len(self._index),
            recovered=self._recovered,
            is_direct=self._slab.is_direct,
            reads=self._num_read + self._peer_reads,
            peer_reads=self._peer_reads,
            read_failures=self._reads.failures + self._peer_failures,
            corrupt=self._corrupt,
            writes=self._num_written,
            write_failures=self._writes.failures,
            writes_dropped=self._dropped,
            late=self._copies.late,
            stopped_reads=self._reads.stopped,
            stopped_writes=self._writes.stopped,
            stopped_peers="; ".join(self._peers.stopped),
        )

    def watch(self, added: Callable[[bytes, int], object], gone: Callable[[bytes], object]) -> dict[bytes, int]:
        """`added` gets the prefix of each block that a peer stores from now on, if it has one. `gone` gets each
        block hash that can no longer be read, before its slot is written again; perhaps twice. Returns
        `found_prefixes`.
        """
        self._gone = gone
        self._peers.watch(lambda found, prefix: self._reads.stopped or added(found, prefix), self._gone_at_peers)
        return self.found_prefixes

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks can be read; they count as used."""
        return 0 if self._reads.stopped else self._index.match(hashes, self._peers)

    # ---- write ---------------------------------------------------------------------------------------------------

    def write(self, block_hash: bytes, block: memoryview, prefix: int | None = None) -> "asyncio.Future[bool]":
        """Store a block and the prefix hash that ends with it, if it has one. The block's
        memory must not change until the future is done. True: it can be read from now on.

        False: it is stored already, by a peer perhaps, or was dropped because the queue is full,
        the device fails or is too slow; or reads are stopped.
        """
        assert len(block_hash) == HASH_BYTES and block.nbytes == self._slab.block_bytes
        if block_hash in self._index or self._index.is_writing(block_hash) or block_hash in self._peers:
            return _no()
        usable = not (self._closed or self._writes.stopped or self._writers.is_full)
        reserved = self._index.reserve(block_hash) if usable else None
        if reserved is None:
            self._dropped += 1
            return _no()
        if reserved.gone is not None:
            self._tell_gone(reserved.gone)
        self._number += 1
        copy = self._copies.begin(self._writes, WRITE_TIMEOUT_S)
        self._writers.submit(
            partial(self._write_slot, reserved.slot, block_hash, prefix, self._number, copy, block),
            partial(self._written, copy, block_hash),
        )
        return copy.done

    def _write_slot(
        self,
        slot: int,
        block_hash: bytes,
        prefix: int | None,
        number: int,
        copy: BlockCopy,
        block: memoryview,
        buffer: memoryview,
    ) -> IOResult:
        """On a thread."""
        staged = buffer[PAGE_BYTES : PAGE_BYTES + self._slab.block_bytes]
        if not copy.copy(block, staged):
            return LATE
        buffer[:PAGE_BYTES] = encode_header(self._fingerprint, block_hash, prefix, number, staged)
        try:
            self._shared.change(SlotContent(slot))
            self._slab.write(slot, buffer)
            self._shared.change(SlotContent(slot, block_hash, prefix))
        except OSError as error:
            return IOResult(IOOutcome.FAILED, str(error))
        return GOOD

    def _written(self, copy: BlockCopy, block_hash: bytes, result: IOResult) -> None:
        good = self._copies.ended(copy, result) and result is GOOD
        self._num_written += good
        if good and block_hash not in self._unwanted:
            self._index.publish(block_hash)
        else:
            good = False
            self._erase(self._index.abandon(block_hash))
        self._unwanted.discard(block_hash)
        copy.finish(good and not self._reads.stopped)

    # ---- read ----------------------------------------------------------------------------------------------------

    async def read(self, block_hash: bytes, target: memoryview, timeout_s: float) -> bool:
        """Read a block into `target`, which is not written to once this has returned.

        False: a miss, and `target` is as it was. If cancelled, `target` is released at once too.
        """
        assert target.nbytes == self._slab.block_bytes and not target.readonly
        if self._closed or self._reads.stopped:
            return False
        begin = self._read_own if block_hash in self._index else self._read_peer
        copy = begin(block_hash, target, timeout_s)
        if copy is None:
            return False
        try:
            return await copy.done
        finally:
            copy.finish(False)  # for a caller that was cancelled

    def _read_own(self, block_hash: bytes, target: memoryview, timeout_s: float) -> BlockCopy | None:
        slot = None if self._readers.is_full else self._index.pin(block_hash)
        if slot is None:
            return None
        copy = self._copies.begin(self._reads, timeout_s)
        self._readers.submit(
            partial(self._read_slot, self._slab.read, slot, block_hash, copy, target),
            partial(self._was_read, copy, block_hash, slot),
        )
        return copy

    def _read_peer(self, block_hash: bytes, target: memoryview, timeout_s: float) -> BlockCopy | None:
        found = None if self._peers.readers.is_full else self._peers.find(block_hash)
        if found is None:
            return None
        peer, slot = found
        copy = self._copies.begin(peer.reads, timeout_s)
        self._peers.readers.submit(
            partial(self._read_slot, peer.read, slot, block_hash, copy, target),
            partial(self._was_read_at_peer, copy, block_hash, peer, slot),
        )
        return copy

    def _read_slot(
        self,
        read: Callable[[int, memoryview], None],
        slot: int,
        block_hash: bytes,
        copy: BlockCopy,
        target: memoryview,
        buffer: memoryview,
    ) -> IOResult:
        """On a thread."""
        if copy.is_over:
            return LATE
        try:
            read(slot, buffer)
        except OSError as error:
            return IOResult(IOOutcome.FAILED, str(error))
        block = buffer[PAGE_BYTES : PAGE_BYTES + self._slab.block_bytes]
        header = decode_header(buffer[:PAGE_BYTES], self._fingerprint, self._slab.block_bytes)
        if header is None or header.block_hash != block_hash or not is_intact(header, block):
            return CORRUPT
        return GOOD if copy.copy(block, target) else LATE

    def _was_read(self, copy: BlockCopy, block_hash: bytes, slot: int, result: IOResult) -> None:
        self._copies.ended(copy, result)
        self._num_read += result is GOOD
        if result is CORRUPT:
            self._corrupt += 1
            if self._corrupt == 1:
                logger.warning("slot %d of the KV store is corrupt: a miss; later ones are only counted", slot)
        if result is not GOOD and result is not LATE and self._index.slot_of(block_hash) == slot:
            self.forget([block_hash])
        self._index.unpin(slot)
        copy.finish(result is GOOD)

    def _was_read_at_peer(
        self, copy: BlockCopy, block_hash: bytes, peer: PeerSlab, slot: int, result: IOResult
    ) -> None:
        """Another block, or a part of one, is no error: the owner has reused the slot."""
        self._copies.ended(copy, result)
        self._peer_reads += result is GOOD
        self._peer_failures += result.outcome is IOOutcome.FAILED
        if result is not GOOD and result is not LATE:
            self._peers.report_corrupt(peer, block_hash, slot)
        copy.finish(result is GOOD)

    # ---- the rest ------------------------------------------------------------------------------------------------

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Drop these blocks, also after a restart, because their content is in doubt. Peers keep what they stored, for
        others.
        """
        for block_hash in hashes:
            self._peers.forget(block_hash)
            slot = self._index.forget(block_hash)
            if slot is not None:
                self._tell_gone(block_hash)
                self._erase(slot)
            elif self._index.is_writing(block_hash):
                self._unwanted.add(block_hash)

    def _tell_gone(self, block_hash: bytes) -> None:
        if block_hash not in self._peers:
            self._gone(block_hash)

    def _gone_at_peers(self, block_hash: bytes) -> None:
        if block_hash not in self._index:
            self._gone(block_hash)

    def _all_gone(self) -> None:
        """Reads have stopped."""
        for block_hash in (*self._index.block_hashes, *self._peers.block_hashes):
            self._gone(block_hash)

    def _erase(self, slot: int) -> None:
        """Make a slot that leaves unreadable, then free it. Such jobs are bounded by the number of slots."""

        def work(_: memoryview) -> None:
            try:
                self._shared.change(SlotContent(slot))
                self._slab.erase(slot)
            except OSError as error:
                logger.warning("slot %d of the KV store could not be erased: %s", slot, error)

        self._writers.submit(work, lambda _: self._index.unpin(slot))

    async def close(self) -> None:
        """End what is in progress without success, then close the file. What is stored stays there."""
        self._closed = True
        self._copies.finish()
        own = self._readers, self._writers
        for threads in own:
            threads.stop()
        peers = self._peers.stop()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        ended = [await asyncio.to_thread(each.join, deadline_s) for each in (*own, *peers)]
        if all(ended[: len(own)]):
            self._slab.close()
            self._shared.close()
        else:
            logger.error("the KV store's device hangs; its file stays open until the process ends")

    def check(self) -> None:
        """Prove the invariants of the index. Raises AssertionError."""
        self._index.check()


def _no() -> "asyncio.Future[bool]":
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    done.set_result(False)
    return done


def store_bytes(num_slots: int, block_bytes: int) -> int:
    """Of the disk: a slab and its index."""
    return slab_bytes(num_slots, block_bytes) + index_bytes(num_slots)


def open_kv_store(folder: Path, size_bytes: int, block_bytes: int, fingerprint: bytes) -> KVStore:
    """A store with a slab in this folder and its index, `size_bytes` together, and with the blocks that this slab and
    all others of this fingerprint hold. Blocks. Raises `KVStoreError`.
    """
    fixed_bytes = store_bytes(0, block_bytes)
    num_slots = (size_bytes - fixed_bytes) // (store_bytes(1, block_bytes) - fixed_bytes)
    if num_slots < 1:
        raise KVStoreError(
            f"a KV store of {size_bytes} bytes holds no block of {block_bytes}; "
            f"give {folder} at least {store_bytes(1, block_bytes)} bytes"
        )
    slab = open_slab(folder, num_slots, block_bytes, encode_title(fingerprint, block_bytes))
    remove_abandoned(folder)  # its own is locked
    try:
        return KVStore(slab, fingerprint)
    except BaseException as error:
        slab.close()
        if isinstance(error, OSError):
            raise KVStoreError(
                f"{folder} cannot be written ({error}); check the disk, or name another folder"
            ) from None
        raise
