"""What a worker's prefix cache has, for routers: a numbered log of the names that came and went.

Pure, and bounded: the names that are present are at most as many as the blocks, and names that went are remembered
for a while. How prefixes are named: `workers.kv_events`.

    log     ── 1 2 3 ... ──>          every name that comes or goes has a number
    reader  ── since(last, reach) ──> what changed; or, if too much was forgotten, everything
"""

import math
from collections import deque
from enum import Enum
from itertools import takewhile

from workers.kv_events import GRAIN, KVEvents, NameChanges

MOST_NAMES = 4096  # in one answer come, and gone: more are asked for again


class Tier(Enum):
    """Where KV lies: ready on the device, or in host memory, from where it has to be brought back."""

    DEVICE = "device"
    HOST = "host"


class CacheLog:
    """Owned by a BlockPool of this block size. Numbers count events from 1; `number` is the newest."""

    def __init__(self, block_size: int, most_gone: int = MOST_NAMES) -> None:
        self.number = 0
        self.grain = math.lcm(GRAIN, block_size)
        self._there: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}  # name -> its event, oldest first
        self._gone: deque[tuple[int, Tier, int]] = deque(maxlen=most_gone)  # (event, tier, name)
        self._forgotten = 0  # the newest removal that `_gone` has lost

    def add(self, tier: Tier, name: int) -> None:
        """It can be found there from now on."""
        self.number += 1
        there = self._there[tier]
        there.pop(name, None)
        there[name] = self.number

    def remove(self, tier: Tier, name: int) -> None:
        """It cannot any more; what was not there is no event."""
        if self._there[tier].pop(name, None) is None:
            return
        self.number += 1
        if len(self._gone) == self._gone.maxlen:
            self._forgotten = self._gone[0][0]
        self._gone.append((self.number, tier, name))

    def names(self, tier: Tier) -> frozenset[int]:
        """What is there now."""
        return frozenset(self._there[tier])

    def since(self, last: int, reach: int, most: int = MOST_NAMES) -> KVEvents:
        """What a reader who stands at `last` and `reach` (see `KVEvents`) does not know; (0, 0): it knows nothing."""
        whole = not last or not reach <= last <= self.number or last < self._forgotten
        if whole:
            last = reach = 0
        come = {tier: self._newer(tier, reach) for tier in Tier}
        events = sorted(number for each in come.values() for number, _ in each)
        end = self.number if len(events) <= most else events[most - 1]
        gone = [] if whole else list(takewhile(lambda each: each[0] > last, reversed(self._gone)))
        changes = {
            tier: NameChanges(
                tuple(name for number, name in come[tier] if number <= end),
                tuple(dict.fromkeys(name for _, where, name in gone if where is tier)),
            )
            for tier in Tier
        }
        return KVEvents(last, self.number, end, self.grain, whole, changes[Tier.DEVICE], changes[Tier.HOST])

    def _newer(self, tier: Tier, reach: int) -> list[tuple[int, int]]:
        """(event, name) of what came behind event `reach` and is there."""
        newest_first = takewhile(lambda item: item[1] > reach, reversed(self._there[tier].items()))
        return [(number, name) for name, number in newest_first]
