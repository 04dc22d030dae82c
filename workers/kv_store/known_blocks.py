"""The blocks that a worker believes to be on a server that it shares with others. Pure."""

from collections import OrderedDict
from collections.abc import Callable

MAX_KNOWN = 1 << 16


class KnownBlocks:
    """Content hashes of known blocks. Beyond `most` the least recently used is forgotten, and `gone` gets it."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self.gone: Callable[[bytes], object] = len
        self._block_hashes: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._most = most

    def __len__(self) -> int:
        return len(self._block_hashes)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_hashes

    def found(self, block_hash: bytes) -> None:
        """It is there."""
        self._block_hashes[block_hash] = None
        self._block_hashes.move_to_end(block_hash)
        if len(self._block_hashes) > self._most:
            self.gone(self._block_hashes.popitem(last=False)[0])

    def lost(self, block_hash: bytes) -> None:
        """It is not there any more."""
        if block_hash in self._block_hashes:
            del self._block_hashes[block_hash]
            self.gone(block_hash)

    def clear(self) -> None:
        for block_hash in list(self._block_hashes):
            self.lost(block_hash)
