"""The blocks that a worker believes to be on a server that it shares with others. Pure."""

from collections import OrderedDict
from collections.abc import Callable

MAX_KNOWN = 1 << 16


class KnownBlocks:
    """By content hash; beyond `most` the least recently used is forgotten. `gone` gets each that leaves."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self.gone: Callable[[bytes], object] = len
        self._names: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._most = most

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def found(self, name: bytes) -> None:
        """It is there."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._most:
            self.gone(self._names.popitem(last=False)[0])

    def lost(self, name: bytes) -> None:
        """It is not there any more."""
        if name in self._names:
            del self._names[name]
            self.gone(name)

    def clear(self) -> None:
        for name in list(self._names):
            self.lost(name)
