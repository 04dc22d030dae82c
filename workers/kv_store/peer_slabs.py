"""The other slabs of a path: what they hold, as their shared indexes tell, and reads of their slots.

    thread   every LOOK_S: which files are there, and what their indexes tell   ──>   event loop: blocks, found and gone

Knows nothing of its own slab. Writes nothing.
"""

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from workers.kv_store.health import StoreHealth
from workers.kv_store.io_threads import MAX_READS, READ_THREADS, IOThreads
from workers.kv_store.shared_index import SharedIndexReader, SlotChange, index_path
from workers.kv_store.slab import SLAB_FILES, Slab, whole

LOOK_S = 0.25
MAX_CHANGES = 4096  # told to the event loop at once


class PeerSlab:
    """A slab that another worker owns, or nobody. Its files close once nothing refers to it. Raises `OSError`."""

    def __init__(
        self, path: Path, own: Slab, fingerprint: bytes, inode: int, on_stop: Callable[[Iterable[bytes]], None]
    ):
        self.inode = inode
        self.slots: dict[bytes, int] = {}  # by block hash; the event loop's
        self.reads = StoreHealth(f"reads of {path}", partial(on_stop, self.slots))
        self.unreported: deque[SlotChange] = deque()  # the looking thread's
        self._offset = own.offset
        self._index = SharedIndexReader(index_path(path), fingerprint)
        weakref.finalize(self, self._index.close)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if own.is_direct else 0))
        weakref.finalize(self, os.close, self._file)

    def look(self) -> list[SlotChange]:
        """Up to `MAX_CHANGES` that were not reported yet."""
        self.unreported += self._index.changes()
        return [self.unreported.popleft() for _ in range(min(len(self.unreported), MAX_CHANGES))]

    def read(self, slot: int, buffer: memoryview) -> None:
        """As `Slab.read`. The owner may write to the slot meanwhile."""
        whole(os.preadv(self._file, [buffer], self._offset(slot)), buffer)


class _Seen(NamedTuple):
    """What one scan of the folder found."""

    ended: list[PeerSlab]
    changes: list[tuple[PeerSlab, list[SlotChange]]]
    more: bool


class PeerSlabs:
    """Owned by a KVStore, which stops it. Opening scans once, which blocks. `found_prefixes`: what that found."""

    def __init__(self, own: Slab, fingerprint: bytes) -> None:
        self.found_prefixes: dict[bytes, int] = {}
        self._own, self._fingerprint = own, fingerprint
        self._known: dict[str, PeerSlab] = {}  # by file; the looking thread's
        self._peers: list[PeerSlab] = []
        self._timer: asyncio.TimerHandle | None = None
        self._looker = IOThreads("kv-store-look", 1, 1, 1)
        self.readers = IOThreads("kv-store-peers", READ_THREADS, MAX_READS, own.slot_bytes)
        self._added: Callable[[bytes, int], object] = self.found_prefixes.__setitem__
        self._gone: Callable[[bytes], object] = len
        more = True
        while more:
            seen = self._look()
            self._take(seen)
            more = seen.more

    def watch(self, added: Callable[[bytes, int], object], gone: Callable[[bytes], object]) -> None:
        """As `KVStore.watch`: scan periodically from now on. `gone` may get blocks that the store itself has.

        On the event loop.
        """
        self._added, self._gone = added, gone
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def __contains__(self, block_hash: object) -> bool:
        return any(block_hash in peer.slots for peer in self._peers if not peer.reads.stopped)

    @property
    def block_hashes(self) -> list[bytes]:
        """What can be read; some twice."""
        return [block_hash for peer in self._peers if not peer.reads.stopped for block_hash in peer.slots]

    def find(self, block_hash: bytes) -> tuple[PeerSlab, int] | None:
        """Where a block is, unless its owner has reused the slot since."""
        usable = (peer for peer in self._peers if block_hash in peer.slots and not peer.reads.stopped)
        peer = next(usable, None)
        return None if peer is None else (peer, peer.slots[block_hash])

    @property
    def stopped(self) -> list[str]:
        """Which slabs are no longer read, and why."""
        return [f"{peer.reads.what}: {peer.reads.stopped}" for peer in self._peers if peer.reads.stopped]

    def forget(self, block_hash: bytes) -> None:
        """Do not read this block from its present slot again."""
        if [peer for peer in self._peers if peer.slots.pop(block_hash, None) is not None]:
            self._gone(block_hash)

    def report_corrupt(self, peer: PeerSlab, block_hash: bytes, slot: int) -> None:
        """The slot has no such block."""
        if peer.slots.get(block_hash) == slot:
            del peer.slots[block_hash]
            if block_hash not in self:
                self._gone(block_hash)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        self._looker.submit(lambda _: self._look(), self._take_and_wait)

    def _look(self) -> _Seen:
        """On the scanning thread."""
        own = self._own.path
        try:
            with os.scandir(own.parent) as entries:
                inodes = {each.name: each.inode() for each in entries if each.name in SLAB_FILES}
        except OSError:  # the folder was removed
            inodes = {}
        inodes.pop(own.name, None)
        ended = [self._known.pop(name) for name, peer in list(self._known.items()) if inodes.get(name) != peer.inode]
        changes = []
        for name, inode in inodes.items():
            try:
                if name not in self._known:
                    path = own.parent / name
                    self._known[name] = PeerSlab(path, self._own, self._fingerprint, inode, self._stop)
                changes.append((self._known[name], self._known[name].look()))
            except OSError:
                continue  # it has no index yet, or is unreadable: again at the next look
        more = any(peer.unreported for peer in self._known.values())
        return _Seen(ended, [(peer, told) for peer, told in changes if told], more)

    def _take_and_wait(self, seen: _Seen) -> None:
        if self._timer is not None:  # not closed
            self._take(seen)
            self._timer = asyncio.get_running_loop().call_later(0 if seen.more else LOOK_S, self._look_again)

    def _take(self, seen: _Seen) -> None:
        gone: list[bytes] = []
        for peer in seen.ended:
            if peer in self._peers:
                self._peers.remove(peer)
                gone += peer.slots
        for peer, changes in seen.changes:
            if peer not in self._peers:
                self._peers.append(peer)
            for (slot, block_hash, prefix), old in changes:
                if old is not None and peer.slots.get(old) == slot:
                    del peer.slots[old]
                    gone.append(old)
                if block_hash is not None:
                    peer.slots[block_hash] = slot
                    if prefix is not None and not peer.reads.stopped:
                        self._added(block_hash, prefix)
        for block_hash in gone:
            if block_hash not in self:
                self._gone(block_hash)

    def _stop(self, hashes: Iterable[bytes]) -> None:
        """Reads of a slab with these have failed several times in a row."""
        for block_hash in hashes:
            if block_hash not in self:
                self._gone(block_hash)

    def stop(self) -> tuple[IOThreads, ...]:
        """Stop scanning. Returns the threads, which end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for threads in (self._looker, self.readers):
            threads.stop()
        return self._looker, self.readers
