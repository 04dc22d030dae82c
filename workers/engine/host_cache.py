"""The prefix cache's second tier: blocks of host memory that keep what the device is about to forget.

    device  cached ──> forgotten when its block is wanted
              │ saved by the step that is going to write the block, or by one before
    host      └─> kept ──> brought back for a prompt, when that is cheaper than computing it again
                      └─> forgotten, oldest first, when there are newer ones

Knows ids and names; knows no memory and no clock.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from workers.engine.cache_log import CacheLog, Tier


class HostCache:
    """Owned by a BlockPool. Its ids are `num_blocks` from `first` on; a name is kept with what the log calls it."""

    def __init__(self, num_blocks: int, first: int, log: CacheLog) -> None:
        self.num_blocks = num_blocks
        self._first = first
        self._log = log
        self._free = dict.fromkeys(range(first, first + num_blocks))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # name -> host block, oldest first
        self._prefixes: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def save(self, name: bytes, prefix: int | None, busy: Collection[int]) -> int | None:
        """The host block into which the step in the making copies this content. None: there is none to spare.

        `busy` are those that this step reads: it saves before it reads.
        """
        assert name not in self._kept, "saved twice"
        block = next((block for block in self._free if block not in busy), None)
        if block is None:
            oldest = next((known for known, block in self._kept.items() if block not in busy), None)
            if oldest is None:
                return None
            block = self._kept[oldest]
            self.forget([oldest])
        del self._free[block]
        self._kept[name] = block
        if prefix is not None:
            self._prefixes[name] = prefix
            self._log.add(Tier.HOST, prefix)
        return block

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The host blocks of as many of these as are kept, without a gap; used, its head last: a tail is older."""
        found = []
        for name in names:
            block = self._kept.get(name)
            if block is None:
                break
            found.append(block)
        for name in reversed(names[: len(found)]):
            self._kept.move_to_end(name)
        return found

    def forget(self, names: Iterable[bytes]) -> None:
        """Their content is in doubt, or there are newer ones."""
        for name in names:
            block = self._kept.pop(name, None)
            if block is None:
                continue
            self._free[block] = None
            prefix = self._prefixes.pop(name, None)
            if prefix is not None:
                self._log.remove(Tier.HOST, prefix)

    def clear(self) -> None:
        self.forget(list(self._kept))

    def check(self) -> None:
        """Prove that each block is free or kept, once, and that the log says so. Raises AssertionError."""
        ids = sorted([*self._free, *self._kept.values()])
        assert ids == list(range(self._first, self._first + self.num_blocks)), "host cache blocks do not balance"
        assert set(self._prefixes) <= set(self._kept), "a prefix outlived its content"
        assert self._log.names(Tier.HOST) == set(self._prefixes.values()), "the log differs from what is kept"
