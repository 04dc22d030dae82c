"""Remote prefix fetch: copies a prefix from one worker's cache into another's, a few blocks with each read.

    owner    cached ──hold──> leased, ready as far as restored and digested ──release──> cached
    reader   begin ──> blocks allocated ──take──> being read ──completed──> hashed and cached
                              └─ passed: computed here meanwhile, not read; blocks given back

Reads come from the front while all prompts wait, and from the back once one of them computes. The fetched prefix is an
ordinary cache entry: a prompt finds it, or recomputes it after its eviction. Pure: time is an argument.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workers.config import RESTORED_SHARE
from workers.engine.blocks import BlockPool, Cached, OutOfBlocks, block_hashes
from workers.engine.estimate import StepEstimate
from workers.engine.leases import LeaseManager
from workers.engine.read_speed import ReadSpeed
from workers.engine.sequence import Lease
from workers.kv_events import prefix_hash_of_block, prefix_hashes

READS = 16  # of a whole prefix, at most: those in flight may be passed; fewer where latency would count
MOST_LINKS = 1024  # whose speed is remembered
_LATENCIES = 4.0  # a read should take at least this many times as long as an empty one


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """A prefix that is being fetched. Its first `num_shared` blocks were here already.

    It is read in units of `unit` blocks, which end where a block of the owner does; at least `least` with each read.
    """

    blocks: tuple[int, ...]
    num_shared: int
    block_hashes: tuple[bytes, ...]
    prefix_hashes: tuple[int, ...]
    owner: str
    num_tokens: int
    block_size: int
    unit: int
    least: int
    latency_s: float
    speed: ReadSpeed
    begun_s: float
    unread: deque[int] = field(default_factory=deque)  # units that are neither read nor passed, ascending
    reading: deque[range] = field(default_factory=deque)  # units of each read, in the order of reads
    from_back: bool = False
    is_read: bool = False  # the first read has begun
    given_back: set[int] = field(default_factory=set)  # places that will not be read

    @property
    def is_done(self) -> bool:
        return not self.unread

    def num_common(self, hashes: Sequence[bytes]) -> int:
        """How many of these first blocks it has too."""
        ours = self.block_hashes
        return bisect_left(range(min(len(hashes), len(ours))), True, key=lambda n: hashes[n] != ours[n])

    @property
    def held(self) -> list[int]:
        """Its blocks but those that were given back."""
        return [block for place, block in enumerate(self.blocks) if place not in self.given_back]

    @property
    def piece(self) -> int:
        """Units of a read: as many as it takes for latency not to count, as fast as the link is now."""
        return max(self.least, _worth_a_read(self.latency_s, self.unit * self.speed.block_s, len(self.blocks)))

    @property
    def num_piece(self) -> int:
        """Blocks of the read that ends next."""
        return (len(self.reading[0]) if self.reading else self.piece) * self.unit

    def arrivals_s(self, now_s: float, block_s: float) -> Iterator[tuple[int, float]]:
        """Blocks that are read or will be, and in how many seconds each is here, if the rest is read from the back."""
        piece = self.piece
        wait_s = max(self.speed.progress_s - now_s, -self.num_piece * block_s)
        for units in self.reading:
            wait_s += len(units) * self.unit * block_s
            yield from ((place, max(0.0, wait_s)) for unit in units for place in self.places(unit))
        for number, unit in enumerate(reversed(self.unread)):
            end = min(len(self.unread), (number // piece + 1) * piece)
            yield from ((place, max(0.0, wait_s + end * self.unit * block_s)) for place in self.places(unit))

    def places(self, unit: int) -> range:
        """Numbers of its full blocks."""
        return range(unit * self.unit, min((unit + 1) * self.unit, len(self.block_hashes)))


def _worth_a_read(latency_s: float, unit_s: float, most: int) -> int:
    """Units, at most `most`, that take at least `_LATENCIES` as long as an empty read; 0: reads take no time."""
    return math.ceil(min(_LATENCIES * latency_s / unit_s, most)) if unit_s else 0


class PrefixFetches:
    """Owned by an Engine. `prefix_blocks`: a local prefix counts in multiples of this many blocks."""

    def __init__(self, pool: BlockPool, leases: LeaseManager, prefix_blocks: int, estimate: StepEstimate) -> None:
        self._pool = pool
        self._leases = leases
        self._prefix_blocks = prefix_blocks
        self._estimate = estimate
        self._in_flight: dict[PrefixFetch, None] = {}
        self._block_s: dict[str, float] = {}  # owner -> of its last fetch, the latest last
        self._start_s = 0.0  # from the begin of a fetch to its first read, as of late

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[PrefixFetch]:
        return iter(self._in_flight)

    def hold(self, key: str, tokens: Sequence[int], now_s: float, salt: str = "") -> Lease | None:
        """Hold the cached part of this prefix for one reader, under a lease of this key. None: nothing is cached.

        What goes on in host memory is included as far as there are free blocks to restore it to.
        """
        hashes = block_hashes(tokens, self._pool.block_size, salt=salt)
        blocks = self._pool.match(hashes)
        restores = self._restores(hashes[len(blocks) :])
        blocks += restores
        return self._leases.offer(key, blocks, now_s, restores, lends=True) if blocks else None

    def _restores(self, hashes: Sequence[bytes]) -> dict[int, Cached]:
        """Free blocks, and the host blocks to restore them from, for the first of these that are in host memory."""
        host, held = self._pool.host, self._leases.num_restored
        most = int(RESTORED_SHARE * (self._pool.num_free + held)) - held
        kept = host.match(hashes[: max(0, most)])
        return {
            block: Cached(host_block, block_hash, host.prefix_of(block_hash))
            for block, host_block, block_hash in zip(self._pool.allocate(len(kept)), kept, hashes, strict=False)
        }

    def known(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of this prefix, in multiples of `prefix_blocks`, with a new reference each."""
        shared = self._pool.match(hashes)
        aligned = len(shared) - len(shared) % self._prefix_blocks
        self._pool.free(shared[aligned:])
        return shared[:aligned]

    def going_on(self, hashes: Sequence[bytes], known: int) -> PrefixFetch | None:
        """The longest of those that bring what follows the first `known` blocks of this prefix."""
        wanted = tuple(hashes[known : known + 1])
        found = (each for each in self._in_flight if wanted and each.block_hashes[known : known + 1] == wanted)
        return max(found, key=lambda each: len(each.block_hashes), default=None)

    def begin(
        self,
        tokens: Sequence[int],
        salt: str = "",
        now_s: float = 0.0,
        *,
        owner: str = "",
        owner_size: int = 1,
        latency_s: float = 0.0,
        bytes_per_s: float = 0.0,
    ) -> PrefixFetch:
        """Allocate blocks for a prefix that another worker holds in blocks of `owner_size` tokens.

        `latency_s` and `bytes_per_s`: the link's, as measured; 0 bytes: as in the cost model. What the last fetch from
        this `owner` took counts more. Raises `OutOfBlocks` and changes nothing.
        """
        size = self._pool.block_size
        hashes = block_hashes(tokens, size, salt=salt)
        shared = self.known(hashes)
        num_shared, num_blocks = len(shared), -(-len(tokens) // size)
        try:
            fresh = self._pool.allocate(num_blocks - num_shared)
        except OutOfBlocks:
            self._pool.free(shared)
            raise
        if bytes_per_s:
            block_s = self._pool.block_bytes / bytes_per_s
        else:
            latency_s = self._estimate.cost.transfer_latency_s
            block_s = self._pool.block_bytes * self._estimate.cost.transfer_byte_s
        unit = math.lcm(owner_size, size) // size
        least = max(-(-(num_blocks - num_shared) // (READS * unit)), 1)
        first = max(least, _worth_a_read(latency_s, unit * block_s, num_blocks)) * unit
        fetch = PrefixFetch(
            blocks=(*shared, *fresh),
            num_shared=num_shared,
            block_hashes=tuple(hashes),
            prefix_hashes=tuple(prefix_hashes(tokens, salt=salt)),
            owner=owner,
            num_tokens=len(tokens),
            block_size=size,
            unit=unit,
            least=least,
            latency_s=latency_s,
            speed=ReadSpeed(self._block_s.get(owner, block_s + latency_s / first), now_s + self._start_s),
            begun_s=now_s,
            unread=deque(range(num_shared // unit, -(-len(hashes) // unit))),
        )
        self._in_flight[fetch] = None
        return fetch

    def take(self, fetch: PrefixFetch, ready_tokens: int, now_s: float) -> tuple[int, int] | None:
        """The next read: its first token and how many, of the first `ready_tokens`. None: there is none now."""
        unread, step = fetch.unread, fetch.unit * fetch.block_size
        num_ready = -(-fetch.num_tokens // step) if ready_tokens >= fetch.num_tokens else ready_tokens // step
        while unread and self._is_here(fetch, unread[0]):
            self._give_back(fetch, unread.popleft())
        ready = bisect_left(unread, num_ready)
        if not ready:
            return None
        piece = fetch.piece
        stop = ready if fetch.from_back else min(piece, ready)
        start = max(0, stop - piece)
        while unread[start] != unread[stop - 1] - (stop - 1 - start):  # it must be in one run
            start, stop = (start + 1, stop) if fetch.from_back else (start, stop - 1)
        units = range(unread[start], unread[stop - 1] + 1)
        for _ in units:
            del unread[start]
        if not fetch.is_read:
            fetch.is_read = True
            self._start_s = (self._start_s + now_s - fetch.begun_s) / 2
        if not fetch.reading:
            fetch.speed.begin(now_s)
        fetch.reading.append(units)
        return units.start * step, min(units.stop * step, fetch.num_tokens) - units.start * step

    def passed(self, fetch: PrefixFetch, num_tokens: int) -> None:
        """A prompt computes these first tokens itself, and goes on behind them."""
        fetch.from_back = True
        while fetch.unread and (fetch.unread[0] + 1) * fetch.unit * fetch.block_size <= num_tokens:
            self._give_back(fetch, fetch.unread.popleft())

    def _give_back(self, fetch: PrefixFetch, unit: int) -> None:
        places = fetch.places(unit)
        self._pool.free([fetch.blocks[place] for place in places])
        fetch.given_back.update(places)

    def _is_here(self, fetch: PrefixFetch, unit: int) -> bool:
        places = fetch.places(unit)
        return self._pool.num_known(fetch.block_hashes[places.start : places.stop]) == len(places)

    def completed(self, fetch: PrefixFetch, first_token: int, now_s: float) -> None:
        """What was read from this token on is here, verified."""
        units = next(each for each in fetch.reading if each.start * fetch.unit * fetch.block_size == first_token)
        fetch.reading.remove(units)
        places = [place for unit in units for place in fetch.places(unit)]
        if places:
            fetch.speed.ended(len(places), now_s)
            self._block_s.pop(fetch.owner, None)
            self._block_s[fetch.owner] = fetch.speed.block_s
            if len(self._block_s) > MOST_LINKS:
                del self._block_s[next(iter(self._block_s))]
        for place in places:
            prefix = prefix_hash_of_block(fetch.prefix_hashes, place, self._pool.block_size)
            self._pool.cache_block(fetch.blocks[place], fetch.block_hashes[place], prefix, fetched=True)

    def end(self, fetch: PrefixFetch) -> None:
        """It has ended or failed. From now on at most the cache keeps what has completed."""
        del self._in_flight[fetch]
        self._pool.free(fetch.held)
