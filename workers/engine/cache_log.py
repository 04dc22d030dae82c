"""What a cache has, for those who route by it: names at a fixed grain, and which of them came and went.

A name stands for all tokens of a prompt up to a multiple of `GRAIN`. It depends on the tokens and their tenant, not on
block sizes or the process, so one chain of a prompt finds its prefixes on every worker. Pure, and bounded: names that
are there are as many as the blocks have, names that went are remembered for a while.

    log     ── 1 2 3 ... ──>          every name that comes or goes has a number
    reader  ── since(last, reach) ──> what changed; or, if too much was forgotten, everything
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from itertools import takewhile

from xxhash import xxh3_64_intdigest

from workers.stats import CacheNews, NameChanges

GRAIN = 128  # tokens
MOST_NAMES = 4096  # in one answer come, and gone: more are asked for again
_NAME_BITS = 60  # two digits of a Python integer, which takes a third less memory than 64 bits do


class Tier(Enum):
    """Where KV lies: ready on the device, or in host memory, from where it has to be brought back."""

    DEVICE = "device"
    HOST = "host"


def chain(tokens: Sequence[int], grain: int = GRAIN, known: Sequence[int] = (), salt: str = "") -> list[int]:
    """A name for each full `grain` of tokens: equal names mean, but for a collision, equal tokens from position 0 on,
    and an equal salt (`Request.cache_salt`).

    `known` are the names of the first ones, as computed before. A collision costs a wrong guess about a cache, never a
    wrong token. Behind a token that no worker would take, nothing is named.
    """
    names = list(known)
    name = names[-1] if names else xxh3_64_intdigest(salt.encode()) if salt else 0
    pack = _packer(grain)
    try:
        for start in range(len(names) * grain, len(tokens) - grain + 1, grain):
            name = xxh3_64_intdigest(pack(*tokens[start : start + grain]), name) >> (64 - _NAME_BITS)
            names.append(name)
    except struct.error:
        pass
    return names


@cache
def _packer(grain: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{grain}I").pack


def name_of_block(names: Sequence[int], index: int, block_size: int) -> int | None:
    """The name, of this chain, of all tokens up to the end of this block; None: none ends there."""
    end = (index + 1) * block_size
    return None if end % GRAIN else names[end // GRAIN - 1]


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

    def since(self, last: int, reach: int, most: int = MOST_NAMES) -> CacheNews:
        """What a reader who stands at `last` and `reach` (see `CacheNews`) does not know; (0, 0): it knows nothing."""
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
        return CacheNews(last, self.number, end, self.grain, whole, changes[Tier.DEVICE], changes[Tier.HOST])

    def _newer(self, tier: Tier, reach: int) -> list[tuple[int, int]]:
        """(event, name) of what came behind event `reach` and is there."""
        newest_first = takewhile(lambda item: item[1] > reach, reversed(self._there[tier].items()))
        return [(number, name) for name, number in newest_first]
