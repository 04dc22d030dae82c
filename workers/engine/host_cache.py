"""The prefix cache's second tier: blocks of host memory that keep what the device evicts.

    device  cached ──> evicted when its block is needed
              │ saved by the step that will overwrite the block, or by an earlier one
    host      └─> probation ──hit──> protected     restored for a prompt, when that is cheaper than recomputing
                    ^    └──> evicted    │
                    └────── the oldest ──┘

Blocks that were hit survive any number of blocks that are used once. Source of the two segments: Karedla, Love and
Wherry, Caching strategies to improve disk system performance (1994). Knows ids and content hashes; knows no memory and
no clock.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from workers.engine.cache_log import CacheLog, Tier

PROTECTED_SHARE = 0.2  # of the blocks; see decision 0060


class HostCache:
    """Owned by a BlockPool. Its block ids are `num_blocks` from `first` on. `prefix`: a name in the cache log."""

    def __init__(self, num_blocks: int, first: int, log: CacheLog) -> None:
        self.num_blocks = num_blocks
        self._first = first
        self._log = log
        self._free = dict.fromkeys(range(first, first + num_blocks))
        self._most_protected = int(num_blocks * PROTECTED_SHARE)
        self._probation: OrderedDict[bytes, int] = OrderedDict()  # name -> host block, oldest first
        self._protected: OrderedDict[bytes, int] = OrderedDict()  # the same, of those that were hit
        self._prefixes: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._probation or name in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def save(self, name: bytes, prefix: int | None, busy: Collection[int]) -> int | None:
        """The host block to which the current step copies this content. None: all are busy.

        `busy` blocks are read by the same step, which saves before it reads.
        """
        assert name not in self, "saved twice"
        block = next((block for block in self._free if block not in busy), None)
        if block is None:
            cached = chain(self._probation.items(), self._protected.items())
            oldest, block = next(((known, block) for known, block in cached if block not in busy), (b"", None))
            if block is None:
                return None
            self.forget([oldest])
        del self._free[block]
        self._probation[name] = block
        if prefix is not None:
            self._prefixes[name] = prefix
            self._log.add(Tier.HOST, prefix)
        return block

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The host blocks of the longest cached prefix of these, marked as hit so that tails are evicted first."""
        found = []
        for name in names:
            block = self._probation.get(name, self._protected.get(name))
            if block is None:
                break
            found.append(block)
        for name, block in zip(reversed(names[: len(found)]), reversed(found), strict=True):
            self._probation.pop(name, None)
            self._protected[name] = block
            self._protected.move_to_end(name)
        while len(self._protected) > self._most_protected:
            name, block = self._protected.popitem(last=False)
            self._probation[name] = block
        return found

    def forget(self, names: Iterable[bytes]) -> None:
        """Drop these names, because their content is in doubt or newer ones need the blocks."""
        for name in names:
            block = self._probation.pop(name, self._protected.pop(name, None))
            if block is None:
                continue
            self._free[block] = None
            prefix = self._prefixes.pop(name, None)
            if prefix is not None:
                self._log.remove(Tier.HOST, prefix)

    def clear(self) -> None:
        self.forget([*self._probation, *self._protected])

    def check(self) -> None:
        """Prove that each block is free or cached, once, and that the log says so. Raises AssertionError."""
        ids = sorted([*self._free, *self._probation.values(), *self._protected.values()])
        assert ids == list(range(self._first, self._first + self.num_blocks)), "host cache blocks do not balance"
        assert len(self._protected) <= self._most_protected, "too much is protected"
        assert all(name in self for name in self._prefixes), "a prefix outlived its content"
        assert self._log.names(Tier.HOST) == set(self._prefixes.values()), "the log differs from what is cached"
