"""The prefix cache's second tier: blocks of host memory that keep what the device evicts.

    device  cached ──> evicted when its block is needed
              │ saved by the step that will overwrite the block, or by an earlier one
    host      └─> cached ──> restored for a prompt, when that is cheaper than recomputing
                        └──> evicted, oldest first, for newer blocks

Knows ids and content hashes; knows no memory and no clock.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from workers.engine.cache_log import CacheLog, Tier


class HostCache:
    """Owned by a BlockPool. Its block ids are `num_blocks` from `first` on. `prefix`: a name in the cache log."""

    def __init__(self, num_blocks: int, first: int, log: CacheLog) -> None:
        self.num_blocks = num_blocks
        self._first = first
        self._log = log
        self._free = dict.fromkeys(range(first, first + num_blocks))
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # name -> host block, oldest first
        self._prefixes: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._cached

    def __len__(self) -> int:
        return len(self._cached)

    def save(self, name: bytes, prefix: int | None, busy: Collection[int]) -> int | None:
        """The host block to which the current step copies this content. None: all are busy.

        `busy` blocks are read by the same step, which saves before it reads.
        """
        assert name not in self._cached, "saved twice"
        block = next((block for block in self._free if block not in busy), None)
        if block is None:
            oldest = next((known for known, block in self._cached.items() if block not in busy), None)
            if oldest is None:
                return None
            block = self._cached[oldest]
            self.forget([oldest])
        del self._free[block]
        self._cached[name] = block
        if prefix is not None:
            self._prefixes[name] = prefix
            self._log.add(Tier.HOST, prefix)
        return block

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The host blocks of the longest cached prefix of these, marked as used so that tails are evicted first."""
        found = []
        for name in names:
            block = self._cached.get(name)
            if block is None:
                break
            found.append(block)
        for name in reversed(names[: len(found)]):
            self._cached.move_to_end(name)
        return found

    def forget(self, names: Iterable[bytes]) -> None:
        """Drop these names, because their content is in doubt or newer ones need the blocks."""
        for name in names:
            block = self._cached.pop(name, None)
            if block is None:
                continue
            self._free[block] = None
            prefix = self._prefixes.pop(name, None)
            if prefix is not None:
                self._log.remove(Tier.HOST, prefix)

    def clear(self) -> None:
        self.forget(list(self._cached))

    def check(self) -> None:
        """Prove that each block is free or cached, once, and that the log says so. Raises AssertionError."""
        ids = sorted([*self._free, *self._cached.values()])
        assert ids == list(range(self._first, self._first + self.num_blocks)), "host cache blocks do not balance"
        assert set(self._prefixes) <= set(self._cached), "a prefix outlived its content"
        assert self._log.names(Tier.HOST) == set(self._prefixes.values()), "the log differs from what is cached"
