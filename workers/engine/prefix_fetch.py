"""Remote prefix fetch: prefixes that go from one worker's cache into another's.

    owner    cached ──hold──> leased, all of it ready ──release──> cached
    reader   begin ──> blocks of ours, bytes on their way ──arrived──> named and cached, or free if they did not

What was fetched lies in the cache like anything else: a prompt finds it there, or computes it again when it is gone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.engine.blocks import BlockPool, OutOfBlocks, prefix_hashes
from workers.engine.leases import LeaseBook
from workers.engine.sequence import Lease
from workers.kv_events import chain, name_of_block


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFetch:
    """A prefix on its way here. The first `num_shared` of its blocks were here already."""

    blocks: tuple[int, ...]
    num_shared: int
    hashes: tuple[bytes, ...]
    names: tuple[int, ...]  # of `cache_log`


class PrefixFetches:
    """Owned by an Engine. `prefix_blocks`: a local prefix counts in multiples of this many blocks."""

    def __init__(self, pool: BlockPool, leases: LeaseBook, prefix_blocks: int) -> None:
        self._pool = pool
        self._leases = leases
        self._prefix_blocks = prefix_blocks
        self._coming: set[PrefixFetch] = set()

    def __iter__(self) -> Iterator[PrefixFetch]:
        return iter(self._coming)

    def hold(self, key: str, tokens: Sequence[int], now_s: float, salt: str = "") -> Lease | None:
        """Keep what the cache has of this prefix for one reader, under a lease of this key. None: it has nothing."""
        hashes = prefix_hashes(tokens, self._pool.block_size, salt=salt)
        return self._leases.hold_cached(key, self._pool.match(hashes), now_s)

    def known(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that are here of this prefix, as far as they count, with one more reference each."""
        shared = self._pool.match(hashes)
        aligned = len(shared) - len(shared) % self._prefix_blocks
        self._pool.free(shared[aligned:])
        return shared[:aligned]

    def begin(self, tokens: Sequence[int], salt: str = "") -> PrefixFetch:
        """Blocks for a prefix that another worker holds for us. Raises `OutOfBlocks` and changes nothing."""
        hashes = prefix_hashes(tokens, self._pool.block_size, salt=salt)
        shared = self.known(hashes)
        aligned = len(shared)
        try:
            fresh = self._pool.allocate(-(-len(tokens) // self._pool.block_size) - aligned)
        except OutOfBlocks:
            self._pool.free(shared)
            raise
        fetch = PrefixFetch((*shared, *fresh), aligned, tuple(hashes), tuple(chain(tokens, salt=salt)))
        self._coming.add(fetch)
        return fetch

    def end(self, fetch: PrefixFetch, *, arrived: bool) -> None:
        """Its bytes are here, verified, or will not come. Either way only the cache keeps the blocks from now on."""
        self._coming.remove(fetch)
        if arrived:
            for index in range(fetch.num_shared, len(fetch.hashes)):
                prefix = name_of_block(fetch.names, index, self._pool.block_size)
                self._pool.name(fetch.blocks[index], fetch.hashes[index], prefix)
        self._pool.free(fetch.blocks)
