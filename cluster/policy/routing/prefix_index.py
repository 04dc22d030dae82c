"""Which workers have which prefix cached, by their cache events and by the prompts that this gateway sent.

    prefix_hashes    128  256  384  512     of ever longer prefixes of a prompt
    holders         {a b} {a b} {a}  {}     of each hash, as one integer with a bit for each worker
    matches         {a: 384, b: 256}

A lookup walks a prompt's hashes once for all workers with hashes of the same spacing. A worker has as many as it has
blocks; all of them together at most `MAX_HASHES` in a tier. What one worker knows to be on a remote server, all that
use this server can read. Pure: time is an argument.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import NamedTuple

from workers.kv_events import HASH_BLOCK_SIZE, KV_TIERS, HashChanges, KVEvents, prefix_hashes

__all__ = ["HASH_BLOCK_SIZE", "Match", "PrefixIndex", "prefix_hashes"]

EXPECT_S = 1.0  # longer than cache events take to arrive
MAX_ANSWERS = 8192  # whose last tokens are remembered
_FEW = 12  # set bits up to which finding them one by one is faster
MAX_HASHES = 1 << 24  # of each tier: 134 million blocks of 16 tokens, 1.6 GiB
_MAX_SHAPES = 1 << 16
_MAX_GROUPS = 1 << 10
_TO_FLAGS = bytes.maketrans(b"01", b"\0\1")

Bits = int  # a bit for each worker's slot
_Get = Callable[[int], Bits | None]
Behind = dict[int, list[int]]  # slot -> tokens in host memory only, on a disk only, on a remote server only
Depth = tuple[int, Bits, Behind]  # tokens, workers that have them, and what of these is behind the device


class Match(NamedTuple):
    """The cached prefix of a prompt on a worker: `tokens`, of which `host_tokens` are in host memory only,
    `disk_tokens` on a disk only, and `remote_tokens` on a remote server only.
    """

    tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0

    @property
    def ready_tokens(self) -> int:
        """The part on the device: its beginning, because caches evict the ends of prefixes first."""
        return self.tokens - self.host_tokens - self.disk_tokens - self.remote_tokens


NO_MATCH = Match(0)


class _Expected(NamedTuple):
    """A prompt that was sent: the hashes that it will add to a worker's cache."""

    worker: str
    bit: Bits
    hashes: list[int]


class _Holders(dict[int, Bits]):
    """Hash -> workers that have it. Equal sets are one object: the hashes of a prompt mostly have the same holders."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[Bits, Bits] = {}

    def add(self, prefix_hash: int, bit: Bits) -> None:
        held = self.get(prefix_hash)
        self[prefix_hash] = bit if held is None else self._shared(held | bit)

    def discard(self, prefix_hash: int, bit: Bits) -> None:
        held = self.get(prefix_hash, 0)
        if held & bit:
            if held == bit:
                del self[prefix_hash]
            else:
                self[prefix_hash] = self._shared(held ^ bit)

    def _shared(self, bits: Bits) -> Bits:
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        return self._shapes.setdefault(bits, bits)


class _TierIndex:
    """One cache tier: the holders of each hash, and the hashes each worker may hold, for when it goes away."""

    def __init__(self, max_hashes: int) -> None:
        self.holders = _Holders()
        self.dropped = 0  # hashes that did not fit
        self._max_hashes = max_hashes
        self._hashes: dict[Bits, array[int]] = {}
        self._least: dict[Bits, int] = {}  # number of hashes below which compaction does not pay

    def change(self, bit: Bits, changes: HashChanges) -> None:
        for prefix_hash in changes.removed:
            self.holders.discard(prefix_hash, bit)
        if not changes.added:
            return
        added = changes.added
        if len(self.holders) + len(added) > self._max_hashes:  # the index is full: what is new is not known
            added = tuple(prefix_hash for prefix_hash in added if prefix_hash in self.holders)
            self.dropped += len(changes.added) - len(added)
        hashes = self._hashes.setdefault(bit, array("Q"))
        for prefix_hash in added:
            self.holders.add(prefix_hash, bit)
        hashes.extend(added)
        if len(hashes) > self._least.get(bit, 1024):
            there = [prefix_hash for prefix_hash in dict.fromkeys(hashes) if self.holders.get(prefix_hash, 0) & bit]
            self._hashes[bit] = array("Q", there)
            self._least[bit] = 2 * max(512, len(there))

    def forget(self, bit: Bits) -> None:
        for prefix_hash in self._hashes.pop(bit, ()):
            self.holders.discard(prefix_hash, bit)
        self._least.pop(bit, None)


class PrefixIndex:
    """Owned by a Policy.

    `take` workers' cache events and `forget` workers that are gone. `expect` a prompt that is sent, and `settle` it
    once it is computed or abandoned. It then counts for another `expect_s`, until the worker's events have arrived.
    """

    def __init__(
        self, block_size: int = HASH_BLOCK_SIZE, expect_s: float = EXPECT_S, max_hashes: int = MAX_HASHES
    ) -> None:
        self.block_size = block_size
        self._expect_s = expect_s
        self._device = _TierIndex(max_hashes)
        self._host = _TierIndex(max_hashes)
        self._disk = _TierIndex(max_hashes)
        self._remote = _TierIndex(max_hashes)
        self._tiers = (self._device, self._host, self._disk, self._remote)
        self._sharing: dict[str, Bits] = {}  # remote server -> the workers that read from it
        self._readers: dict[Bits, Bits] = {}  # who told of a block on a server -> who can read it
        self._slots: dict[str, int] = {}  # worker -> its bit's number
        self.membership_version = 0  # grows when a worker comes, restarts or goes
        self._incarnations: dict[str, str] = {}  # worker -> the incarnation whose cache this is
        self._by_step: dict[int, Bits] = {}  # these workers have every step-th hash of a prompt
        self._workers: list[str] = []  # slot -> worker
        self._free: list[int] = []
        self._groups: dict[Bits, tuple[str, ...]] = {}
        self._expected_holders = _Holders()
        self._expected_counts: dict[tuple[int, Bits], int] = {}  # (hash, worker) -> prompts expected to add it
        self._expected: dict[str, _Expected] = {}
        self._settled: deque[tuple[float, str]] = deque()  # (until when it counts, key)
        self._answers: OrderedDict[int, tuple[Bits, tuple[int, ...]]] = (
            OrderedDict()
        )  # last hash -> worker, and the rest

    # ---- lookups ---------------------------------------------------------------------------------------------

    def matches(self, hashes: Sequence[int], now_s: float = 0.0, prompt: Sequence[int] = ()) -> dict[str, Match]:
        """How much of the prompt with these hashes each worker has; workers without any are left out.

        `prompt`: the tokens, to find what an `answered` worker has behind its last hash. Check `is_of` for a worker
        that may have restarted.
        """
        found: dict[str, Match] = {}
        for tokens, holders, behind in self.depths(hashes, now_s, prompt):
            self._found(found, holders, tokens, behind)
        return found

    def depths(self, hashes: Sequence[int], now_s: float = 0.0, prompt: Sequence[int] = ()) -> list[Depth]:
        """The same with sets of workers as bits of their slots; each worker appears once."""
        self._expire(now_s)
        found: list[Depth] = []
        for step, workers in self._by_step.items():
            self._walk(found, hashes[step - 1 :: step] if step > 1 else hashes, workers, step * self.block_size)
        if self._answers and prompt:
            self._add_answers(found, hashes, prompt)
        return found

    def _add_answers(self, found: list[Depth], hashes: Sequence[int], prompt: Sequence[int]) -> None:
        """A worker that computed an answer has it to its end, not only to its last hash."""
        for place, (depth, holders, behind) in enumerate(found.copy()):
            bit, rest = self._answers.get(hashes[depth // self.block_size - 1], (0, ()))
            if bit & holders and tuple(prompt[depth : depth + len(rest)]) == rest:
                found[place] = depth + len(rest), bit, behind
                if holders != bit:
                    found.append((depth, holders ^ bit, behind))

    def slot(self, worker: str, incarnation: str) -> int:
        """The number of its bit, valid for one `membership_version`; -1 for an unknown worker."""
        return self._slots[worker] if self._incarnations.get(worker) == incarnation else -1

    def _walk(self, found: list[Depth], hashes: Sequence[int], workers: Bits, block_size: int) -> None:
        """Append how far each of these workers, which have hashes at multiples of `block_size` tokens, matches."""
        device, expected = self._device.holders, self._expected_holders
        tiers = self._tiers_behind()
        behind: Behind = {}
        have, last = workers, -1
        depth = 0
        for prefix_hash in hashes:
            holds = device.get(prefix_hash, 0)
            if expected:
                holds |= expected.get(prefix_hash, 0)
            for get, tokens, _ in tiers:
                if stored := (get(prefix_hash) or 0) & ~holds & have:
                    holds |= stored
                    tokens[stored] = tokens.get(stored, 0) + block_size
            if holds is not last:
                still = have & holds
                if depth and still != have:
                    found.append((depth, have ^ still, behind))
                have, last = still, holds
                if not have:
                    break
            depth += block_size
        if depth and have:
            found.append((depth, have, behind))
        for _, tokens, place in tiers:
            for slot, count in ((slot, count) for bits, count in tokens.items() for slot in _slots(bits)):
                behind.setdefault(slot, [0, 0, 0])[place] += count

    def _tiers_behind(self) -> list[tuple[_Get, dict[Bits, int], int]]:
        """Of each tier behind the device that has hashes: who has a hash, a place for tokens, and the tier's number."""
        found: tuple[_Get, ...] = self._host.holders.get, self._disk.holders.get, self._readable
        return [(get, {}, place) for place, get in enumerate(found) if self._tiers[1 + place].holders]

    def _readable(self, prefix_hash: int) -> Bits:
        """The workers that can read this from their remote server."""
        told = self._remote.holders.get(prefix_hash, 0)
        readers = self._readers.get(told)
        if readers is None:
            if len(self._readers) >= _MAX_GROUPS:
                self._readers.clear()
            readers = told
            for workers in self._sharing.values():
                readers |= workers if workers & told else 0
            self._readers[told] = readers
        return readers

    @property
    def dropped(self) -> tuple[tuple[str, int], ...]:
        """Hashes that were not taken because the index was full, by tier."""
        return tuple((name, tier.dropped) for name, tier in zip(KV_TIERS, self._tiers, strict=True))

    def is_of(self, worker: str, incarnation: str) -> bool:
        """Whether the index describes this incarnation of the worker."""
        return self._incarnations.get(worker) == incarnation

    def _found(self, found: dict[str, Match], holders: Bits, tokens: int, behind: Behind) -> None:
        found.update(dict.fromkeys(self._named(holders), Match(tokens)))
        for slot, counts in behind.items():
            if holders >> slot & 1:
                found[self._workers[slot]] = Match(tokens, *counts)

    def _named(self, holders: Bits) -> tuple[str, ...]:
        """The workers of these bits. Cached, because popular prefixes have the same set again and again."""
        named = self._groups.get(holders)
        if named is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            if holders.bit_count() <= _FEW:
                named = tuple(self._workers[slot] for slot in _slots(holders))
            else:
                named = tuple(compress(self._workers, bin(holders)[:1:-1].encode().translate(_TO_FLAGS)))
            self._groups[holders] = named
        return named

    # ---- cache events ----------------------------------------------------------------------------------------

    def take(self, worker: str, incarnation: str, events: KVEvents, server: str = "") -> None:
        """Apply cache events of this incarnation; what was known of another one is dropped.

        `server`: the remote server from which the worker reads blocks, and which of them.
        """
        bit = self._bit(worker, incarnation)
        self._set_step(bit, max(1, events.block_size // self.block_size))
        if server and not self._sharing.get(server, 0) & bit:
            self._sharing[server] = self._sharing.get(server, 0) | bit
            self._readers.clear()
        for tier, changes in zip(self._tiers, (getattr(events, tier) for tier in KV_TIERS), strict=True):
            if events.whole:
                tier.forget(bit)
            tier.change(bit, changes)

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        del self._incarnations[worker]
        self.membership_version += 1
        for tier in self._tiers:
            tier.forget(1 << slot)
        self._sharing = {server: left for server, bits in self._sharing.items() if (left := bits & ~(1 << slot))}
        self._readers.clear()
        self._set_step(1 << slot, 0)
        for key in [key for key, expected in self._expected.items() if expected.worker == worker]:
            self.withdraw(key)
        self._workers[slot] = ""
        self._free.append(slot)
        self._groups.clear()

    def _bit(self, worker: str, incarnation: str) -> Bits:
        if self._incarnations.get(worker) != incarnation:
            self.forget(worker)
            if not self._free:
                self._free.append(len(self._workers))
                self._workers.append("")
            slot = self._slots[worker] = self._free.pop()
            self._incarnations[worker], self._workers[slot] = incarnation, worker
            self.membership_version += 1
            self._set_step(1 << slot, 1)
        return 1 << self._slots[worker]

    def _set_step(self, bit: Bits, step: int) -> None:
        """Set the spacing of the worker's hashes; 0: the worker is gone."""
        if self._by_step.get(step, 0) & bit:
            return
        for known in [known for known, bits in self._by_step.items() if bits & bit]:
            self._by_step[known] ^= bit
            if not self._by_step[known]:
                del self._by_step[known]
        if step:
            self._by_step[step] = self._by_step.get(step, 0) | bit

    def answered(self, worker: str, tokens: Sequence[int], salt: str = "") -> None:
        """The worker has computed an answer: it has the KV of all these tokens, prompt included, but the last one."""
        hashes = prefix_hashes(tokens[:-1], self.block_size, salt=salt)
        slot = self._slots.get(worker)
        if slot is None or not hashes:
            return
        self._answers.pop(hashes[-1], None)
        self._answers[hashes[-1]] = 1 << slot, tuple(tokens[len(hashes) * self.block_size : -1])
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    # ---- prompts sent by this gateway ---------------------------------------------------------------------------

    def expect(self, key: str, worker: str, incarnation: str, hashes: Sequence[int]) -> None:
        """A prompt was sent there: its prefix counts as cached for prompts that follow."""
        bit = self._bit(worker, incarnation)
        fresh = [prefix_hash for prefix_hash in hashes if not self._device.holders.get(prefix_hash, 0) & bit]
        self._add(key, _Expected(worker, bit, fresh))

    def _add(self, key: str, expected: _Expected) -> None:
        bit = expected.bit
        for prefix_hash in expected.hashes:
            pair = prefix_hash, bit
            count = self._expected_counts[pair] = self._expected_counts.get(pair, 0) + 1
            if count == 1:
                self._expected_holders.add(prefix_hash, bit)
        self.withdraw(key)
        self._expected[key] = expected

    @contextmanager
    def without(self, key: str) -> Iterator[None]:
        """Hide this prompt, to find out where it would be placed now."""
        expected = self._expected.get(key)
        self.withdraw(key)
        try:
            yield
        finally:
            if expected is not None:
                self._add(key, expected)

    def settle(self, key: str, now_s: float) -> None:
        """The prompt is computed, or never will be. Unknown keys are ignored."""
        if key in self._expected:
            self._settled.append((now_s + self._expect_s, key))

    def _expire(self, now_s: float) -> None:
        while self._settled and self._settled[0][0] <= now_s:
            self.withdraw(self._settled.popleft()[1])

    def withdraw(self, key: str) -> None:
        """The prompt no longer counts as cached there. Unknown keys are ignored."""
        expected = self._expected.pop(key, None)
        if expected is None:
            return
        bit = expected.bit
        for prefix_hash in expected.hashes:
            pair = prefix_hash, bit
            count = self._expected_counts[pair] - 1
            if count:
                self._expected_counts[pair] = count
            else:
                del self._expected_counts[pair]
                self._expected_holders.discard(prefix_hash, bit)


def _slots(bits: Bits) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
