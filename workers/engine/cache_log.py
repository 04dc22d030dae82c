"""A numbered log of names added to and removed from a worker's prefix cache, for routers.

Pure and bounded: there are at most as many names as blocks, and a limited number of removals is remembered. How
prefixes are named: `workers.kv_events`.

    log     ── 1 2 3 ... ──>          every name that is added or removed gets a number
    reader  ── since(last, reach) ──> what changed; or everything, if too many removals were forgotten
"""

import math
from collections import deque
from enum import Enum
from itertools import takewhile

from workers.kv_events import GRAIN, KVEvents, NameChanges

MOST_NAMES = 4096  # added, and removed, in one reply: the reader asks again for more


class Tier(Enum):
    """Where KV is: ready on the device, in host memory, from where it is copied back, or on a disk, read before."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class CacheLog:
    """Owned by a BlockPool of this block size. Numbers count events from 1; `number` is the newest."""

    def __init__(self, block_size: int, most_removed: int = MOST_NAMES) -> None:
        self.number = 0
        self.grain = math.lcm(GRAIN, block_size)
        self._there: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}  # name -> its event, oldest first
        self._removed: deque[tuple[int, Tier, int]] = deque(maxlen=most_removed)  # (event, tier, name)
        self._forgotten = 0  # the newest removal that `_removed` has lost

    def add(self, tier: Tier, name: int) -> None:
        """The name is now cached there."""
        self.number += 1
        there = self._there[tier]
        there.pop(name, None)
        there[name] = self.number

    def remove(self, tier: Tier, name: int) -> None:
        """The name is no longer cached there; ignored if it was not."""
        if self._there[tier].pop(name, None) is None:
            return
        self.number += 1
        if len(self._removed) == self._removed.maxlen:
            self._forgotten = self._removed[0][0]
        self._removed.append((self.number, tier, name))

    def names(self, tier: Tier) -> frozenset[int]:
        """The names cached there now."""
        return frozenset(self._there[tier])

    def since(self, last: int, reach: int, most: int = MOST_NAMES) -> KVEvents:
        """What changed for a reader at `last` and `reach` (see `KVEvents`); (0, 0): a reader that knows nothing."""
        whole = not last or not reach <= last <= self.number or last < self._forgotten
        if whole:
            last = reach = 0
        added = {tier: self._newer(tier, reach) for tier in Tier}
        events = sorted(number for each in added.values() for number, _ in each)
        end = self.number if len(events) <= most else events[most - 1]
        removed = [] if whole else list(takewhile(lambda each: each[0] > last, reversed(self._removed)))
        changes = {
            tier: NameChanges(
                tuple(name for number, name in added[tier] if number <= end),
                tuple(dict.fromkeys(name for _, where, name in removed if where is tier)),
            )
            for tier in Tier
        }
        tiers = (changes[tier] for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
        return KVEvents(last, self.number, end, self.grain, whole, *tiers)

    def _newer(self, tier: Tier, reach: int) -> list[tuple[int, int]]:
        """(event, name) of the names added after event `reach` that are still cached."""
        newest_first = takewhile(lambda item: item[1] > reach, reversed(self._there[tier].items()))
        return [(number, name) for name, number in newest_first]
