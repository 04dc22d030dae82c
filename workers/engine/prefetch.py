"""Prefetches cached prefixes while their prompts wait or are computed: from stores into host memory, and from other
workers onto the device (`prefix_fetch`).

    a prompt waits behind others    its blocks are read from the front, which delays nothing
    its turn comes                  it is computed from the front and read from the back (`race`)
    the two meet                    a step uses what was read, and computes the rest of the prompt

A block that is missing, late or corrupt is computed. Pure: time is an argument, and stores report how long reads took.
"""

import math
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from workers.engine.blocks import BlockPool
from workers.engine.estimate import StepEstimate
from workers.engine.prefix_fetch import PrefixFetch, PrefixFetches
from workers.engine.race import Gap, StepSeconds, choose
from workers.engine.read_speed import ReadSpeed
from workers.engine.sequence import Sequence, State
from workers.engine.store_tiers import StoreTier
from workers.kv_events import prefix_hash_of_block, prefix_hashes

FIND_TIMEOUT_S = 1.0
PATIENCE = 0.025  # share of the time to compute a prompt that it may wait for reads that do not arrive


@dataclass(slots=True, eq=False)
class _Prefetch:
    """A prompt whose cached prefix continues in a store or on another worker. Places are indices of `block_hashes`.

    `known`: how many leading blocks each store has. `end`: the most of these, and of what a fetch brings. `unfound`:
    number of stores that have not answered yet. `fetch`: the running fetch that brings the next block. `reads`: whether
    reading more from stores pays, and `from_back` from which end. `has_read`: a read for it has begun. `is_new`: it was
    just added. `turn_s`: when its turn came (-1: not yet), `compute_s`: seconds to compute all of it at that time.
    """

    sequence: Sequence
    block_hashes: Items[bytes]
    known: list[int]
    end: int
    unfound: int
    fetch: PrefixFetch | None = None
    unread: deque[int] = field(default_factory=deque)  # ascending
    reading: set[int] = field(default_factory=set)
    reads: bool = True
    from_back: bool = False
    is_new: bool = True
    has_read: bool = False
    turn_s: float = -1.0
    compute_s: float = 0.0
    wait_until_s: float = 0.0

    def patience_until_s(self, now_s: float, compute_s: float) -> float:
        """Until when it may wait: as long as computing what has arrived since its turn would take, and `PATIENCE` more.

        `compute_s`: seconds to compute what has not arrived. The first call marks its turn.
        """
        if self.turn_s < 0.0:
            self.turn_s, self.compute_s = now_s, compute_s
        return self.turn_s + (self.compute_s - compute_s) + PATIENCE * self.compute_s


@dataclass(slots=True, eq=False)
class _Read:
    """A read of one block into host memory. `wanted`: the prompts that need it, and at which place."""

    block_hash: bytes
    prefix: int | None
    block: int
    tiers: list[StoreTier]  # the one that reads, and those to be tried if it fails
    begun_s: float
    wanted: list[tuple[_Prefetch, int]]


def _may_load(sequence: Sequence) -> bool:
    return not (sequence.request.fresh or sequence.wants_prompt_rows or sequence.borrows)


class Prefetcher:
    """Owned by an Engine. The first tier that has a block is asked for it.

    `wakes_at_s`: when a prompt that waits now has waited long enough.
    """

    def __init__(
        self,
        tiers: Items[StoreTier],
        pool: BlockPool,
        estimate: StepEstimate,
        fetches: PrefixFetches,
    ) -> None:
        self.wakes_at_s = math.inf
        self._tiers = tiers
        self._pool = pool
        self._host = pool.host
        self._size = pool.block_size
        self._estimate = estimate
        self._fetches = fetches
        self._prefetches: dict[Sequence, _Prefetch] = {}
        self._reads: dict[bytes, _Read] = {}
        self._now_s = 0.0

    # ---- a prompt comes and goes ---------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, now_s: float) -> None:
        """Ask the stores what they have behind the part of the prompt that is here."""
        if not self._tiers or not _may_load(sequence):
            return
        self._now_s = max(self._now_s, now_s)
        hashes = self._block_hashes(sequence)
        first = self._num_here(hashes)
        end = min(len(hashes), first + self._most_ahead)
        if not self._is_worth_reading(sequence, first, end):
            return
        prefetch = _Prefetch(sequence, hashes, [0] * len(self._tiers), first, len(self._tiers))
        self._prefetches[sequence] = prefetch
        for number, tier in enumerate(self._tiers):
            tier.find(hashes[first:end], FIND_TIMEOUT_S, partial(self._found, prefetch, number, first))
        prefetch.is_new = False  # its turn, if it is now, decides where reads begin

    def _block_hashes(self, sequence: Sequence) -> list[bytes]:
        """The hashes of all blocks that may be read. At least one token is left to compute."""
        sequence.hash_tokens(self._size)
        return sequence.block_hashes[: (len(sequence.tokens) - 1) // self._size]

    def _num_here(self, hashes: Items[bytes]) -> int:
        """How many of the first blocks are on the device or in host memory."""
        known = self._pool.num_known(hashes)
        behind = (place for place in range(known, len(hashes)) if not self._is_here(hashes[place]))
        return next(behind, len(hashes))

    def _is_here(self, block_hash: bytes) -> bool:
        return block_hash in self._pool or block_hash in self._host

    def _is_worth_reading(self, sequence: Sequence, first: int, end: int) -> bool:
        """Whether copying these blocks from host memory would be faster than computing them."""
        cost, size, num_tokens = self._estimate.cost, self._size, len(sequence.tokens)
        saved_s = cost.prefill_seconds(num_tokens - first * size, first * size)
        saved_s -= cost.prefill_seconds(num_tokens - end * size, end * size)
        return cost.swap_seconds((end - first) * self._pool.block_bytes) / 2 < saved_s

    def _found(self, prefetch: _Prefetch, number: int, first: int, count: int) -> None:
        prefetch.unfound -= 1
        end = first + count
        prefetch.known[number] = end
        prefetch.unread.extend(range(prefetch.end, end))
        prefetch.end = max(prefetch.end, end)
        if not prefetch.unfound and prefetch.end == first:
            self.end(prefetch.sequence)
        if not prefetch.is_new:
            self.read()

    def end(self, sequence: Sequence) -> None:
        """Stop reading for it."""
        if self._prefetches.pop(sequence, None) is not None:
            sequence.from_stores.clear()

    def __bool__(self) -> bool:
        """Whether anything is being read or fetched."""
        return bool(self._prefetches or self._fetches)

    def has(self, sequence: Sequence) -> bool:
        """Whether some of its prefix may still be read."""
        return sequence in self._prefetches

    # ---- its turn comes ------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> None:
        """A step is about to be built."""
        self._now_s = max(self._now_s, now_s)
        self.wakes_at_s = math.inf

    def waits_until_s(self, sequence: Sequence, seconds: StepSeconds) -> float | None:
        """Until when a prompt whose turn has come should wait for reads; None: it should not wait."""
        prefetch = self._prefetch_of(sequence)
        if prefetch is None:
            return None
        first = self._num_here(prefetch.block_hashes[: prefetch.end]) * self._size
        if self._tokens_now(prefetch, first, seconds):
            return None
        return prefetch.wait_until_s

    def tokens_now(self, sequence: Sequence, seconds: StepSeconds) -> int:
        """How many of its missing tokens the next step should compute, at most."""
        prefetch = self._prefetch_of(sequence)
        if prefetch is None:
            return len(sequence.tokens)
        self._pass(prefetch, sequence.num_scheduled)
        return self._tokens_now(prefetch, sequence.num_scheduled, seconds)

    def _prefetch_of(self, sequence: Sequence) -> _Prefetch | None:
        """Its prefetch, with the fetch from another worker that brings its next block, if there is one."""
        prefetch = self._prefetches.get(sequence)
        fetch: PrefixFetch | None = None
        if self._fetches and _may_load(sequence):
            hashes = self._block_hashes(sequence)
            first = -(-sequence.num_scheduled // self._size) or self._num_here(hashes)
            fetch = self._fetches.going_on(hashes, first)
            if fetch is not None:
                if prefetch is None:
                    prefetch = self._prefetches[sequence] = _Prefetch(sequence, hashes, [0] * len(self._tiers), 0, 0)
                prefetch.end = max(prefetch.end, fetch.num_common(hashes))
        if prefetch is not None:
            prefetch.fetch = fetch
        return prefetch

    def _tokens_now(self, prefetch: _Prefetch, first: int, seconds: StepSeconds) -> int:
        total, cached = len(prefetch.sequence.tokens), prefetch.end * self._size
        compute_s = seconds.now(total - first, first)
        patience_until_s = prefetch.patience_until_s(self._now_s, compute_s)
        if prefetch.unfound and self._now_s < patience_until_s:
            return self._wait(prefetch, patience_until_s)
        if first >= cached:
            return total
        until = self._next_here(prefetch, first)
        wait_until_s = max(patience_until_s, self._late_at_s(prefetch))
        has_patience = self._is_read(prefetch) and self._now_s < wait_until_s
        missing = self._arrivals(prefetch, first, until, fast=has_patience)
        gap = Gap(
            first=first,
            until=until,
            cached=cached,
            total=total,
            missing=missing,
            copy_s=self._estimate.cost.swap_seconds(self._pool.block_bytes) / 2 if self._tiers else 0.0,
            can_wait=has_patience and until - first == len(missing) * self._size > 0,
            since_s=self._now_s - prefetch.turn_s,
        )
        choice = choose(gap, seconds)
        first_until_s = self._first_until_s(prefetch, len(missing)) if choice.num_tokens and missing else 0.0
        if self._now_s + seconds.floor_s > first_until_s:  # the next step would end later
            first_until_s = 0.0
        prefetch.reads = choice.reads and self._now_s >= first_until_s
        prefetch.from_back = choice.num_tokens > 0 or prefetch.sequence.state is State.RUNNING
        if not prefetch.reads and prefetch.unread and not self._tier(prefetch, prefetch.unread[-1]).num_reading:
            self._read_next(prefetch)  # one block, to notice when the store has become faster
        if not choice.num_tokens:
            return self._wait(prefetch, wait_until_s, max(arrives_s for _, arrives_s in missing))
        if self._now_s < first_until_s:
            return self._wait(prefetch, first_until_s)
        end = min(-(-(first + choice.num_tokens) // self._size) * self._size, until if choice.reads else total)
        return end - first

    def _first_until_s(self, prefetch: _Prefetch, num_missing: int) -> float:
        """Until when to wait for the first read although computing seems faster, since reads may be faster than before.

        If it has not ended by then, reading the rest takes longer than computing it.
        """
        fetch = prefetch.fetch
        if prefetch.has_read or not self._is_read(prefetch) or (fetch is not None and fetch.speed.num_reads):
            return 0.0
        if fetch is not None:
            fetch.from_back = True
        num_blocks = fetch.num_piece if fetch is not None else 1
        return prefetch.turn_s + min(num_blocks / num_missing, PATIENCE) * prefetch.compute_s

    def _wait(self, prefetch: _Prefetch, until_s: float, read_s: float = 0.0) -> int:
        """Wait until `until_s` if nothing arrives, or for `read_s` while reads arrive as expected."""
        prefetch.wait_until_s = max(until_s, self._now_s + read_s)
        self.wakes_at_s = min(self.wakes_at_s, until_s)
        return 0

    def _is_read(self, prefetch: _Prefetch) -> bool:
        """Whether more of it is being read, or can be."""
        return bool(prefetch.fetch or prefetch.reading or self._num_ahead() < self._most_ahead)

    def _late_at_s(self, prefetch: _Prefetch) -> float:
        """When the next read to end would be late."""
        patience_s = PATIENCE * prefetch.compute_s
        if prefetch.fetch is not None:
            return prefetch.fetch.speed.late_at_s(prefetch.fetch.num_piece, patience_s)
        tiers = {self._reads[prefetch.block_hashes[place]].tiers[0] for place in prefetch.reading}
        return min((tier.speed.late_at_s(1, patience_s) for tier in tiers), default=0.0)

    def _arrivals(self, prefetch: _Prefetch, first: int, until: int, *, fast: bool) -> list[tuple[int, float]]:
        """For each block between `first` and `until` that is being read or could be: its first token, and in how many
        seconds it arrives.

        A store reads one block after the other, and so does a fetch. Blocks that are not being read yet will be read
        from the back, so from one store after the other.
        """
        now_s = self._now_s

        def seconds(speed: ReadSpeed, num_blocks: int, *, is_reading: bool = True) -> float:
            return speed.fast_block_s if fast or not is_reading else speed.slow_block_s(now_s, num_blocks)

        block_s = {tier: seconds(tier.speed, 1, is_reading=bool(tier.num_reading)) for tier in self._tiers}
        waits_s = {tier: -min(now_s - tier.speed.progress_s, block_s[tier]) for tier in self._tiers if tier.num_reading}
        arrivals: dict[int, float] = {}
        for read in self._reads.values():
            waits_s[read.tiers[0]] += block_s[read.tiers[0]]
            for each, place in read.wanted:
                if each is prefetch:
                    arrivals[place] = waits_s[read.tiers[0]]
        wait_s = 0.0
        for place in reversed(prefetch.unread):
            tier = self._tier(prefetch, place)
            wait_s = arrivals[place] = max(wait_s, waits_s.get(tier, 0.0)) + block_s[tier]
        if prefetch.fetch is not None:
            fetch = prefetch.fetch
            for place, arrives_s in fetch.arrivals_s(now_s, seconds(fetch.speed, fetch.num_piece)):
                arrivals[place] = min(arrives_s, arrivals.get(place, math.inf))
        in_order = ((place * self._size, arrivals[place]) for place in sorted(arrivals))
        return [each for each in in_order if first <= each[0] < until]

    def _pass(self, prefetch: _Prefetch, first: int) -> None:
        """The prompt has been computed up to this token."""
        if prefetch.fetch is not None:
            self._fetches.passed(prefetch.fetch, first)
        if first >= prefetch.end * self._size and not prefetch.unfound:
            return self.end(prefetch.sequence)
        while prefetch.unread and prefetch.unread[0] * self._size < first:
            prefetch.unread.popleft()
        prefetch.reading = {place for place in prefetch.reading if place * self._size >= first}
        prefetch.sequence.from_stores = {
            place: tier for place, tier in prefetch.sequence.from_stores.items() if place * self._size >= first
        }

    def _next_here(self, prefetch: _Prefetch, first: int) -> int:
        """The first token after `first` whose block is here. A block at `first` itself does not count."""
        places = iter(range(-(-first // self._size), prefetch.end))
        if not first % self._size:
            next((place for place in places if not self._is_here(prefetch.block_hashes[place])), None)
        place = next((place for place in places if self._is_here(prefetch.block_hashes[place])), prefetch.end)
        return place * self._size

    # ---- reads ---------------------------------------------------------------------------------------------------

    @property
    def _most_ahead(self) -> int:
        return self._host.num_blocks // 2

    def _num_ahead(self) -> int:
        """Blocks of host memory that were read, or are being read, for prompts."""
        return sum(len(each.reading) + len(each.sequence.from_stores) for each in self._prefetches.values())

    def _tier(self, prefetch: _Prefetch, place: int) -> StoreTier:
        return next(tier for tier, known in zip(self._tiers, prefetch.known, strict=True) if place < known)

    def read(self) -> None:
        """Begin what can be read now: first for running prompts from the back, then for waiting ones from the front."""
        if not any(tier.is_free for tier in self._tiers):
            return
        left = self._most_ahead - self._num_ahead()
        for prefetch in sorted(self._prefetches.values(), key=lambda each: each.sequence.state is not State.RUNNING):
            if prefetch.sequence.state is State.RUNNING:
                self._pass(prefetch, prefetch.sequence.num_scheduled)
            while left > 0 and prefetch.reads and prefetch.unread and self._read_next(prefetch):
                left -= 1

    def _read_next(self, prefetch: _Prefetch) -> bool:
        place = prefetch.unread[-1 if prefetch.from_back else 0]
        block_hash = prefetch.block_hashes[place]
        read = self._reads.get(block_hash)
        if read is not None:
            read.wanted.append((prefetch, place))
        elif not self._is_here(block_hash):
            tiers = [tier for tier, known in zip(self._tiers, prefetch.known, strict=True) if place < known]
            block = self._host.load(block_hash) if tiers[0].is_free else None
            if block is None:
                return False
            read = _Read(block_hash, self._prefix(prefetch, place), block, tiers, self._now_s, [(prefetch, place)])
            self._reads[block_hash] = read
            self._try(read)
        if read is not None:
            prefetch.reading.add(place)
        prefetch.unread.pop() if prefetch.from_back else prefetch.unread.popleft()
        return True

    def _prefix(self, prefetch: _Prefetch, place: int) -> int | None:
        sequence = prefetch.sequence
        sequence.prefix_hashes = prefix_hashes(sequence.tokens, known=sequence.prefix_hashes, salt=sequence.salt)
        return prefix_hash_of_block(sequence.prefix_hashes, place, self._size)

    def _try(self, read: _Read) -> None:
        read.tiers[0].read(read.block_hash, read.block, self._now_s, partial(self._ended, read))

    def _ended(self, read: _Read, arrived: bool, seconds: float) -> None:
        tier = read.tiers.pop(0)
        read.begun_s += seconds
        self._now_s = max(self._now_s, read.begun_s)
        wanted = [each for each in read.wanted if each[0].sequence in self._prefetches and each[1] in each[0].reading]
        if not arrived and read.tiers and wanted:
            return self._try(read)
        del self._reads[read.block_hash]
        is_here = self._host.loaded(read.block, read.prefix, arrived=arrived)
        for prefetch, place in wanted:
            prefetch.reading.remove(place)
            prefetch.has_read = True
            if is_here:
                prefetch.sequence.from_stores[place] = tier.tier
        self.read()

    def check(self) -> None:
        """Prove that host memory holds a block for each read. Raises AssertionError."""
        assert {each.block for each in self._reads.values()} == self._host.loading, "reads differ from host memory's"
        for prefetch in self._prefetches.values():
            assert prefetch.sequence.state is not State.FINISHED, "a sequence that ended is prefetch"
            assert not prefetch.reading & set(prefetch.unread), "a block is read twice"
            assert all(prefetch.block_hashes[place] in self._reads for place in prefetch.reading), "a read is lost"
