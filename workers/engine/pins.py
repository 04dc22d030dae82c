"""Which blocks host memory keeps, whatever else comes, and until when. Knows content hashes. Time is an argument."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Pin(NamedTuple):
    """Ends at `until_s`, which is `ttl_s` after the last use."""

    ttl_s: float
    until_s: float


class Pins:
    """Owned by a HostCache. Pins at most `most` names, whether their content is here or not."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._pins: dict[bytes, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: bytes) -> bool:
        return name in self._pins

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pins)

    def num_missing(self, names: Iterable[bytes]) -> int:
        """How many more than `most` would be pinned with these; 0: there is room."""
        return max(0, len(self._pins.keys() | set(names)) - self.most)

    def add(self, names: Iterable[bytes], ttl_s: float, now_s: float) -> None:
        """The caller has checked that there is room. A later pin replaces an earlier one."""
        self._pins |= dict.fromkeys(names, Pin(ttl_s, now_s + ttl_s))
        assert len(self._pins) <= self.most, "more is pinned than may be"

    def renew(self, names: Sequence[bytes], now_s: float) -> None:
        """A prompt with these blocks has come: its pinned head lasts longer."""
        for name in names:
            pin = self._pins.get(name)
            if pin is None:
                return
            self._pins[name] = Pin(pin.ttl_s, max(pin.until_s, now_s + pin.ttl_s))

    def remove(self, names: Iterable[bytes]) -> list[bytes]:
        """Unpin these; returns those that were pinned."""
        return [name for name in names if self._pins.pop(name, None) is not None]

    def expire(self, now_s: float) -> list[bytes]:
        """Unpin what has ended, and return it."""
        return self.remove([name for name, pin in self._pins.items() if pin.until_s <= now_s])
