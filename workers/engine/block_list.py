"""Block ids in an order that can be changed anywhere: a linked list in two arrays, eight bytes for each id.

An `OrderedDict` takes eleven times as much, which counts where pools have millions of blocks. Knows nothing of blocks.
"""

from array import array
from collections.abc import Iterable, Iterator

_OUT = -1
_OUT_BYTES = array("i", [_OUT]).tobytes()
_IDS: list[int] = []


def block_ids(begin: int, stop: int) -> list[int]:
    """These ids, as the same objects for every pool of a process."""
    _IDS.extend(range(len(_IDS), stop))
    return _IDS[begin:stop]


class BlockList:
    """Ids below the number of `grow`n ones, each at most once. All but iteration takes constant time."""

    def __init__(self, count: int = 0) -> None:
        self._next, self._previous = array("i", [0]), array("i", [0])  # by id + 1; 0: before the first, after the last
        self.length = 0
        self.grow(count)

    def grow(self, count: int) -> None:
        """So many more ids."""
        for links in (self._next, self._previous):
            links.frombytes(_OUT_BYTES * count)

    def __len__(self) -> int:
        return self.length

    def __contains__(self, block: int) -> bool:
        return self._next[block + 1] != _OUT

    def __iter__(self) -> Iterator[int]:
        """First to last. The list must not change meanwhile."""
        node = self._next[0]
        while node:
            yield _IDS[node - 1]
            node = self._next[node]

    def extend(self, blocks: Iterable[int]) -> None:
        """Add ids that are not here."""
        following, previous, last = self._next, self._previous, self._previous[0]
        for block in blocks:
            node = block + 1
            following[last], previous[node] = node, last
            last = node
            self.length += 1
        following[last], previous[0] = 0, last

    def appendleft(self, block: int) -> None:
        """Add an id that is not here as the first."""
        node, first = block + 1, self._next[0]
        self._next[node], self._previous[node] = first, 0
        self._next[0] = self._previous[first] = node
        self.length += 1

    def discard(self, block: int) -> bool:
        """Remove it. False: it was not here."""
        node = block + 1
        after = self._next[node]
        if after == _OUT:
            return False
        before = self._previous[node]
        self._next[before], self._previous[after] = after, before
        self._next[node] = _OUT
        self.length -= 1
        return True

    def popleft(self, count: int) -> list[int]:
        """Remove the first `count` of a list that has as many."""
        following, node, taken = self._next, self._next[0], []
        for _ in range(count):
            taken.append(_IDS[node - 1])
            after = following[node]
            following[node] = _OUT
            node = after
        following[0], self._previous[node] = node, 0
        self.length -= count
        return taken
