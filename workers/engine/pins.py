"""Which blocks host memory keeps, whatever else comes, and until when. Knows content hashes. Time is an argument."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Pin(NamedTuple):
    """Ends at `until_s`, which is `ttl_s` after the last use."""

    ttl_s: float
    until_s: float


class Pins:
    """Owned by a HostCache. Pins at most `most` blocks, whether their content is here or not."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._pins: dict[bytes, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._pins

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pins)

    def num_missing(self, hashes: Iterable[bytes]) -> int:
        """How many more than `most` would be pinned with these; 0: there is room."""
        return max(0, len(self._pins.keys() | set(hashes)) - self.most)

    def add(self, hashes: Iterable[bytes], ttl_s: float, now_s: float) -> None:
        """The caller has checked that there is room. A later pin replaces an earlier one."""
        self._pins |= dict.fromkeys(hashes, Pin(ttl_s, now_s + ttl_s))
        assert len(self._pins) <= self.most, "more is pinned than may be"

    def renew(self, hashes: Sequence[bytes], now_s: float) -> None:
        """A prompt with these blocks has come: its pinned head lasts longer."""
        for block_hash in hashes:
            pin = self._pins.get(block_hash)
            if pin is None:
                return
            self._pins[block_hash] = Pin(pin.ttl_s, max(pin.until_s, now_s + pin.ttl_s))

    def remove(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Unpin these; returns those that were pinned."""
        return [block_hash for block_hash in hashes if self._pins.pop(block_hash, None) is not None]

    def expire(self, now_s: float) -> list[bytes]:
        """Unpin what has ended, and return it."""
        return self.remove([block_hash for block_hash, pin in self._pins.items() if pin.until_s <= now_s])
