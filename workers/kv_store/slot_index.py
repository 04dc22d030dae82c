"""Which slot holds which block: LRU order, pins of readers, and slots that are being written.

    free ──reserve──> writing ──publish──> stored ──reserve for another hash──> writing
      ^                  └──abandon──┐       │ (not while pinned)
      └──last unpin── leaving <──────┴─forget┘

LRU, not scan-resistant: a block arrives only after memory has evicted it. Knows no file and
no clock. Pure.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple


class SlotReservation(NamedTuple):
    """A slot to write, and the hash whose block it held until now."""

    slot: int
    gone: bytes | None


class SlotIndex:
    """Owned by a KVStore. `found`: (hash, slot) of a file's blocks, oldest first; the last of equal hashes counts."""

    def __init__(self, num_slots: int, found: Iterable[tuple[bytes, int]] = ()) -> None:
        self.num_slots = num_slots
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        for block_hash, slot in found:
            self._stored[block_hash] = slot
            self._stored.move_to_end(block_hash)
        taken = set(self._stored.values())
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in taken]
        self._writing: dict[bytes, int] = {}
        self._pins: dict[int, int] = {}  # slot -> number of pins
        self._leaving: set[int] = set()  # pinned, until readers are gone and the slot is erased

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """What is stored, least recently used first."""
        return tuple(self._stored)

    def is_writing(self, block_hash: bytes) -> bool:
        return block_hash in self._writing

    def slot_of(self, block_hash: bytes) -> int | None:
        return self._stored.get(block_hash)

    def match(self, hashes: Sequence[bytes], elsewhere: Container[bytes] = ()) -> int:
        """How many of the first blocks are stored, here or elsewhere. Marks those here as used, so that tails are
        evicted first.
        """
        stored = self._stored
        absent = (place for place, each in enumerate(hashes) if each not in stored and each not in elsewhere)
        count = next(absent, len(hashes))
        for block_hash in reversed(hashes[:count]):
            if block_hash in stored:
                stored.move_to_end(block_hash)
        return count

    def reserve(self, block_hash: bytes) -> SlotReservation | None:
        """A slot for a new block. None: the block is here or being written, or every slot is in use.

        A block that gives up its slot is gone with this call.
        """
        if block_hash in self._stored or block_hash in self._writing:
            return None
        gone = None
        if self._free:
            slot = self._free.pop()
        else:
            gone = next((known for known, slot in self._stored.items() if slot not in self._pins), None)
            if gone is None:
                return None
            slot = self._stored.pop(gone)
        self._writing[block_hash] = slot
        return SlotReservation(slot, gone)

    def publish(self, block_hash: bytes) -> None:
        """The block is written completely: readers may find it."""
        self._stored[block_hash] = self._writing.pop(block_hash)

    def abandon(self, block_hash: bytes) -> int:
        """The block was not written. Returns its slot as `forget` does: it may hold an older block's bytes."""
        return self._leave(self._writing.pop(block_hash))

    def pin(self, block_hash: bytes) -> int | None:
        """The slot of a stored block, which keeps its content until `unpin`. None: not stored."""
        slot = self._stored.get(block_hash)
        if slot is not None:
            self._pins[slot] = self._pins.get(slot, 0) + 1
        return slot

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        del self._pins[slot]
        if slot in self._leaving:
            self._leaving.remove(slot)
            self._free.append(slot)

    def forget(self, block_hash: bytes) -> int | None:
        """Remove a stored block. Its slot is pinned for the caller, who erases and unpins it. None: not stored."""
        slot = self._stored.pop(block_hash, None)
        return None if slot is None else self._leave(slot)

    def _leave(self, slot: int) -> int:
        self._pins[slot] = self._pins.get(slot, 0) + 1
        self._leaving.add(slot)
        return slot

    def check(self) -> None:
        """Prove that each slot is in one state, once. Raises AssertionError."""
        slots = Counter([*self._free, *self._stored.values(), *self._writing.values(), *self._leaving])
        assert slots == Counter(range(self.num_slots)), "slots do not balance"
        assert not self._stored.keys() & self._writing.keys(), "a block is stored and being written"
        assert all(count > 0 for count in self._pins.values()), "a pin without a reader"
        assert self._leaving <= self._pins.keys() <= self._leaving | set(self._stored.values()), "a free slot is pinned"
