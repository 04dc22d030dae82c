"""A numbered log of prefix hashes added to and removed from a worker's prefix cache, for routers.

Pure and bounded: there are at most as many hashes as blocks, at most as many additions that are no longer true, and a
limited number of removals is remembered. How prefixes are hashed: `workers.kv_events`.

    log     ── 1 2 3 ... ──>          every hash that is added or removed gets a number
    reader  ── since(last, reach) ──> what changed; or everything, if too many removals were forgotten
"""

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import takewhile

from workers.kv_events import HASH_BLOCK_SIZE, HashChanges, KVEvents

MAX_HASHES = 4096  # additions, and removals, that one reply covers: the reader asks again for more


class Tier(Enum):
    """Where KV is: ready on the device, in host memory, from where it is copied back, or on a disk or a remote server,
    from where it is read before.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"

    __hash__ = object.__hash__  # Enum's own is a Python function


TIERS = tuple(Tier)
_PLACES = {tier: place for place, tier in enumerate(TIERS)}


class KVEventLog:
    """Owned by a BlockPool of this block size. Numbers count events from 1; `number` is the newest.

    `max_removed`: how many removals are remembered.
    """

    def __init__(self, block_size: int, max_removed: int = MAX_HASHES) -> None:
        self.number = 0
        self.hash_block_size = math.lcm(HASH_BLOCK_SIZE, block_size)
        self._there: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}  # hash -> its event
        self._num_there = 0
        self._slack = max_removed
        self._added = _Additions()
        self._removed: deque[tuple[int, Tier, int]] = deque(maxlen=max_removed)  # (event, tier, hash)
        self._forgotten = 0  # the newest removal that `_removed` has lost

    def add(self, tier: Tier, prefix_hash: int) -> None:
        """The prefix is now cached there."""
        there = self._there[tier]
        self._num_there += prefix_hash not in there
        self.number = there[prefix_hash] = self.number + 1
        self._added.append(self.number, tier, prefix_hash)
        if len(self._added) > 2 * self._num_there + self._slack:
            self._shorten()

    def _shorten(self) -> None:
        """Drop the two oldest additions; those that are still true are logged again."""
        for _ in range(2):
            number, tier, prefix_hash = self._added.popleft()
            if self._there[tier].get(prefix_hash) == number:
                self.number = self._there[tier][prefix_hash] = self.number + 1
                self._added.append(self.number, tier, prefix_hash)

    def remove(self, tier: Tier, prefix_hash: int) -> None:
        """The prefix is no longer cached there; ignored if it was not."""
        if self._there[tier].pop(prefix_hash, None) is None:
            return
        self._num_there -= 1
        self.number += 1
        if len(self._removed) == self._removed.maxlen:
            self._forgotten = self._removed[0][0]
        self._removed.append((self.number, tier, prefix_hash))

    def hashes(self, tier: Tier) -> frozenset[int]:
        """The hashes cached there now."""
        return frozenset(self._there[tier])

    def since(self, last: int, reach: int, most: int = MAX_HASHES) -> KVEvents:
        """What changed for a reader at `last` and `reach` (see `KVEvents`); (0, 0): a reader that knows nothing."""
        whole = not last or not reach <= last <= self.number or last < self._forgotten
        if whole:
            last = reach = 0
        added: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        end = reach
        for number, tier, prefix_hash in self._added.after(reach, most):
            end = number
            if self._there[tier].get(prefix_hash) == number:
                added[tier].append(prefix_hash)
        if end >= self._added.newest:
            end = self.number
        removed = [] if whole else list(takewhile(lambda each: each[0] > last, reversed(self._removed)))
        changes = (
            HashChanges(tuple(added[tier]), tuple(dict.fromkeys(gone for _, where, gone in removed if where is tier)))
            for tier in TIERS
        )
        return KVEvents(last, self.number, end, self.hash_block_size, whole, *changes)


class _Additions:
    """The additions by number, oldest first, those included that are no longer true."""

    def __init__(self) -> None:
        self._numbers = array("Q")
        self._places = bytearray()  # of tiers
        self._hashes = array("Q")
        self._begin = 0  # what is before it was dropped

    def __len__(self) -> int:
        return len(self._numbers) - self._begin

    @property
    def newest(self) -> int:
        return self._numbers[-1] if self._numbers else 0

    def append(self, number: int, tier: Tier, prefix_hash: int) -> None:
        self._numbers.append(number)
        self._places.append(_PLACES[tier])
        self._hashes.append(prefix_hash)

    def popleft(self) -> tuple[int, Tier, int]:
        place = self._begin
        oldest = self._numbers[place], TIERS[self._places[place]], self._hashes[place]
        self._begin += 1
        if self._begin > len(self):
            for each in (self._numbers, self._places, self._hashes):
                del each[: self._begin]
            self._begin = 0
        return oldest

    def after(self, number: int, most: int) -> Iterator[tuple[int, Tier, int]]:
        """The next `most` after this event."""
        begin = bisect_right(self._numbers, number, self._begin)
        part = slice(begin, begin + most)
        return zip(self._numbers[part], map(TIERS.__getitem__, self._places[part]), self._hashes[part], strict=True)
