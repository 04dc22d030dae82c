"""Which workers have which prefix: what they said of their caches, and for a while what this gateway sent them.

    chain(prompt)    128  256  384  512     names of ever longer beginnings
    holders         {a b} {a b} {a}  {}     of each name, as one integer with a bit for each worker
    matches         {a: 384, b: 256}

A lookup walks the chain once for all workers whose names have the same distance. Pure: time is an argument.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from workers.kv_events import GRAIN, KVEvents, NameChanges, chain

__all__ = ["GRAIN", "Match", "PrefixIndex", "chain"]

HOPE_S = 1.0  # longer than news take
_FEW = 12  # set bits that are faster found one by one than all at once
_MOST_SHAPES = 1 << 16
_MOST_GROUPS = 1 << 10
_TO_FLAGS = bytes.maketrans(b"01", b"\0\1")

Bits = int  # a bit for each worker's slot
Depth = tuple[int, Bits, dict[int, int]]  # prompt tokens, workers that have them; slot -> how many in host memory only


class Match(NamedTuple):
    """How much of a prompt a worker has: `tokens` from its beginning on, of which `host_tokens` lie in host memory."""

    tokens: int
    host_tokens: int = 0

    @property
    def ready_tokens(self) -> int:
        """What lies on the device: the beginning, since caches forget the ends of prefixes first."""
        return self.tokens - self.host_tokens


NO_MATCH = Match(0)


@dataclass(slots=True)
class Guesses:
    """How right the index was about the workers that prompts were sent to: off by less than a grain is right.

    `tokens` were believed to be cached; of the wrong ones, `absent` were not, and `unknown` were without being known.
    """

    prompts: int = 0
    wrong: int = 0
    tokens: int = 0
    absent_tokens: int = 0
    unknown_tokens: int = 0


class _Expected(NamedTuple):
    """A prompt on its way: the names that it brings to a worker, and how much of it that is believed to have."""

    worker: str
    bit: Bits
    names: list[int]
    believed_tokens: int


class _Holders(dict[int, Bits]):
    """Name -> who has it. Equal sets of workers are one object: names of one chain mostly have the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[Bits, Bits] = {}

    def add(self, name: int, bit: Bits) -> None:
        held = self.get(name)
        self[name] = bit if held is None else self._shared(held | bit)

    def discard(self, name: int, bit: Bits) -> None:
        held = self.get(name, 0)
        if held & bit:
            if held == bit:
                del self[name]
            else:
                self[name] = self._shared(held ^ bit)

    def _shared(self, bits: Bits) -> Bits:
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        return self._shapes.setdefault(bits, bits)


class _Told:
    """One tier: who has what, and the names that each worker was ever said to have, for when it is to be forgotten."""

    def __init__(self) -> None:
        self.holders = _Holders()
        self._names: dict[Bits, array[int]] = {}
        self._least: dict[Bits, int] = {}  # number of names below which a clean-up is not worth it

    def change(self, bit: Bits, changes: NameChanges) -> None:
        for name in changes.removed:
            self.holders.discard(name, bit)
        if not changes.added:
            return
        names = self._names.setdefault(bit, array("Q"))
        for name in changes.added:
            self.holders.add(name, bit)
        names.extend(changes.added)
        if len(names) > self._least.get(bit, 1024):
            there = [name for name in dict.fromkeys(names) if self.holders.get(name, 0) & bit]
            self._names[bit] = array("Q", there)
            self._least[bit] = 2 * max(512, len(there))

    def forget(self, bit: Bits) -> None:
        for name in self._names.pop(bit, ()):
            self.holders.discard(name, bit)
        self._least.pop(bit, None)


class PrefixIndex:
    """Owned by a Policy.

    `take` what workers say and `forget` those that are gone; `expect` a prompt that is sent, and `settle` what was
    expected once the prompt is computed or given up: it is believed for `hope_s` more, by when news have come.
    """

    def __init__(self, grain: int = GRAIN, hope_s: float = HOPE_S) -> None:
        self.grain = grain
        self._hope_s = hope_s
        self._device = _Told()
        self._host = _Told()
        self._slots: dict[str, int] = {}  # worker -> its bit's number
        self.lives = 0  # grows when a worker comes, restarts or goes
        self._lives: dict[str, str] = {}  # worker -> the incarnation whose cache this is
        self._by_step: dict[int, Bits] = {}  # every so many names of a chain these workers have one
        self._workers: list[str] = []  # slot -> worker
        self._free: list[int] = []
        self._groups: dict[Bits, tuple[str, ...]] = {}
        self._hoped = _Holders()
        self._hopes: dict[tuple[int, Bits], int] = {}  # (name, worker) -> how many prompts are expected to bring it
        self._expected: dict[str, _Expected] = {}
        self.guesses = Guesses()
        self._settled: deque[tuple[float, str]] = deque()  # (until when it is believed, key)

    # ---- asking ----------------------------------------------------------------------------------------------

    def matches(self, names: Sequence[int], now_s: float = 0.0) -> dict[str, Match]:
        """How much of this chain each worker has; who has nothing is left out.

        Ask `is_of` before a worker that may have restarted is believed to have it.
        """
        found: dict[str, Match] = {}
        for tokens, who, on_host in self.depths(names, now_s):
            self._found(found, who, tokens, on_host)
        return found

    def depths(self, names: Sequence[int], now_s: float = 0.0) -> list[Depth]:
        """The same for many workers at once, as bits of their slots: each once."""
        self._expire(now_s)
        found: list[Depth] = []
        for step, workers in self._by_step.items():
            self._walk(found, names[step - 1 :: step] if step > 1 else names, workers, step * self.grain)
        return found

    def slot(self, worker: str, incarnation: str) -> int:
        """The number of its bit, for as long as `lives` is the same; -1 for one of which nothing is known."""
        return self._slots[worker] if self._lives.get(worker) == incarnation else -1

    def _walk(self, found: list[Depth], names: Sequence[int], workers: Bits, grain: int) -> None:
        """These workers have names at multiples of `grain` tokens: note how far each one's go."""
        device, host, hoped = self._device.holders, self._host.holders, self._hoped
        on_host: dict[int, int] = {}  # slot -> tokens that only its host memory has
        have, last = workers, -1
        depth = 0
        for name in names:
            ready = device.get(name, 0)
            if hoped:
                ready |= hoped.get(name, 0)
            holds = ready
            if host and (saved := host.get(name, 0) & ~ready & have):
                holds = ready | saved
                for slot in _slots(saved):
                    on_host[slot] = on_host.get(slot, 0) + grain
            if holds is not last:
                still = have & holds
                if depth and still != have:
                    found.append((depth, have ^ still, on_host))
                have, last = still, holds
                if not have:
                    return
            depth += grain
        if depth:
            found.append((depth, have, on_host))

    def is_of(self, worker: str, incarnation: str) -> bool:
        """Whether what is known of this worker is of this incarnation of it."""
        return self._lives.get(worker) == incarnation

    def _found(self, found: dict[str, Match], who: Bits, tokens: int, on_host: dict[int, int]) -> None:
        found.update(dict.fromkeys(self._named(who), Match(tokens)))
        for slot, host_tokens in on_host.items():
            if who >> slot & 1:
                found[self._workers[slot]] = Match(tokens, host_tokens)

    def _named(self, who: Bits) -> tuple[str, ...]:
        """The workers of these bits. Of prefixes that many have, the same many are asked for again and again."""
        named = self._groups.get(who)
        if named is None:
            if len(self._groups) >= _MOST_GROUPS:
                self._groups.clear()
            if who.bit_count() <= _FEW:
                named = tuple(self._workers[slot] for slot in _slots(who))
            else:
                named = tuple(compress(self._workers, bin(who)[:1:-1].encode().translate(_TO_FLAGS)))
            self._groups[who] = named
        return named

    # ---- what workers say ------------------------------------------------------------------------------------

    def take(self, worker: str, incarnation: str, news: KVEvents) -> None:
        """What this incarnation says of its cache; of another one, all is forgotten."""
        bit = self._bit(worker, incarnation)
        self._set_step(bit, max(1, news.grain // self.grain))
        for known, changes in ((self._device, news.device), (self._host, news.host)):
            if news.whole:
                known.forget(bit)
            known.change(bit, changes)

    def forget(self, worker: str) -> None:
        """It is gone."""
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        del self._lives[worker]
        self.lives += 1
        self._device.forget(1 << slot)
        self._host.forget(1 << slot)
        self._set_step(1 << slot, 0)
        for key in [key for key, expected in self._expected.items() if expected.worker == worker]:
            self._give_up(key)
        self._workers[slot] = ""
        self._free.append(slot)
        self._groups.clear()

    def _bit(self, worker: str, incarnation: str) -> Bits:
        if self._lives.get(worker) != incarnation:
            self.forget(worker)
            if not self._free:
                self._free.append(len(self._workers))
                self._workers.append("")
            slot = self._slots[worker] = self._free.pop()
            self._lives[worker], self._workers[slot] = incarnation, worker
            self.lives += 1
            self._set_step(1 << slot, 1)
        return 1 << self._slots[worker]

    def _set_step(self, bit: Bits, step: int) -> None:
        """0: nobody's any more."""
        if self._by_step.get(step, 0) & bit:
            return
        for known in [known for known, bits in self._by_step.items() if bits & bit]:
            self._by_step[known] ^= bit
            if not self._by_step[known]:
                del self._by_step[known]
        if step:
            self._by_step[step] = self._by_step.get(step, 0) | bit

    # ---- what this gateway sends -----------------------------------------------------------------------------

    def expect(self, key: str, worker: str, incarnation: str, names: Sequence[int], believed_tokens: int = 0) -> None:
        """A prompt is on its way there: the cache will have it, and does for prompts that come behind it.

        `believed_tokens` of it are cached there, as was believed when it was sent.
        """
        bit = self._bit(worker, incarnation)
        fresh = [name for name in names if not self._device.holders.get(name, 0) & bit]
        self._hope(key, _Expected(worker, bit, fresh, believed_tokens))

    def _hope(self, key: str, expected: _Expected) -> None:
        bit = expected.bit
        for name in expected.names:
            hope = name, bit
            count = self._hopes[hope] = self._hopes.get(hope, 0) + 1
            if count == 1:
                self._hoped.add(name, bit)
        self._give_up(key)
        self._expected[key] = expected

    def found(self, key: str, cached_tokens: int) -> None:
        """So much of the prompt was cached indeed. Keys that are not expected are ignored."""
        expected, guesses = self._expected.get(key), self.guesses
        if expected is None:
            return
        guesses.prompts += 1
        guesses.tokens += expected.believed_tokens
        absent = expected.believed_tokens - cached_tokens
        if abs(absent) >= self.grain:
            guesses.wrong += 1
            guesses.absent_tokens += max(0, absent)
            guesses.unknown_tokens += max(0, -absent)

    def withdraw(self, key: str) -> None:
        """The prompt will not be computed there after all. Keys that are not expected are ignored."""
        self._give_up(key)

    @contextmanager
    def without(self, key: str) -> Iterator[None]:
        """As if this prompt were not on its way, to ask where it would go."""
        expected = self._expected.get(key)
        self._give_up(key)
        try:
            yield
        finally:
            if expected is not None:
                self._hope(key, expected)

    def settle(self, key: str, now_s: float) -> None:
        """The prompt is computed, or will not be. Of keys that are not expected, or said twice, it is no news."""
        if key in self._expected:
            self._settled.append((now_s + self._hope_s, key))

    def _expire(self, now_s: float) -> None:
        while self._settled and self._settled[0][0] <= now_s:
            self._give_up(self._settled.popleft()[1])

    def _give_up(self, key: str) -> None:
        expected = self._expected.pop(key, None)
        if expected is None:
            return
        bit = expected.bit
        for name in expected.names:
            hope = name, bit
            count = self._hopes[hope] - 1
            if count:
                self._hopes[hope] = count
            else:
                del self._hopes[hope]
                self._hoped.discard(name, bit)


def _slots(bits: Bits) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
