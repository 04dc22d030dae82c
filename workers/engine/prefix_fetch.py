"""Remote prefix fetch: copies a prefix from one worker's cache into another's.

    owner    cached ──hold──> leased, ready as far as restored and digested ──release──> cached
    reader   begin ──> blocks allocated, bytes in flight ──arrived──> hashed and cached, or freed after a failure

The fetched prefix is an ordinary cache entry: a prompt finds it, or recomputes it after its eviction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.config import RESTORED_SHARE
from workers.engine.blocks import BlockPool, Cached, OutOfBlocks, prefix_hashes
from workers.engine.leases import LeaseBook
from workers.engine.sequence import Lease
from workers.kv_events import chain, name_of_block


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFetch:
    """A prefix that is being fetched since `begun_s`. Its first `num_shared` blocks were here already."""

    begun_s: float
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
        self._in_flight: set[PrefixFetch] = set()

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[PrefixFetch]:
        return iter(self._in_flight)

    def hold(self, key: str, tokens: Sequence[int], now_s: float, salt: str = "") -> Lease | None:
        """Hold the cached part of this prefix for one reader, under a lease of this key. None: nothing is cached.

        What goes on in host memory is included as far as there are free blocks to restore it to.
        """
        hashes = prefix_hashes(tokens, self._pool.block_size, salt=salt)
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
            block: Cached(host_block, name, host.prefix_of(name))
            for block, host_block, name in zip(self._pool.allocate(len(kept)), kept, hashes, strict=False)
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
        found = (each for each in self._in_flight if wanted and each.hashes[known : known + 1] == wanted)
        return max(found, key=lambda each: len(each.hashes), default=None)

    def begin(self, tokens: Sequence[int], salt: str = "", now_s: float = 0.0) -> PrefixFetch:
        """Allocate blocks for a prefix that another worker holds. Raises `OutOfBlocks` and changes nothing."""
        hashes = prefix_hashes(tokens, self._pool.block_size, salt=salt)
        shared = self.known(hashes)
        aligned = len(shared)
        try:
            fresh = self._pool.allocate(-(-len(tokens) // self._pool.block_size) - aligned)
        except OutOfBlocks:
            self._pool.free(shared)
            raise
        fetch = PrefixFetch(now_s, (*shared, *fresh), aligned, tuple(hashes), tuple(chain(tokens, salt=salt)))
        self._in_flight.add(fetch)
        return fetch

    def end(self, fetch: PrefixFetch, *, arrived: bool) -> None:
        """The fetch has `arrived`, verified, or failed. From now on at most the cache keeps the blocks."""
        self._in_flight.remove(fetch)
        if arrived:
            for index in range(fetch.num_shared, len(fetch.hashes)):
                prefix = name_of_block(fetch.names, index, self._pool.block_size)
                self._pool.name(fetch.blocks[index], fetch.hashes[index], prefix, fetched=True)
        self._pool.free(fetch.blocks)
