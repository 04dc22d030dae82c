"""Prefixes that go from one worker's cache into another's: what is lent out, and what is on its way here.

    owner    cached ──lend──> leased, all of it ready ──release──> cached
    reader   borrow ──> blocks of ours, bytes on their way ──arrived──> named and cached, or free if they did not

What was borrowed lies in the cache like anything else: a prompt finds it there, or computes it again when it is gone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.engine.blocks import BlockPool, OutOfBlocks, prefix_hashes
from workers.engine.leases import LeaseBook
from workers.engine.sequence import Lease
from workers.kv_events import chain, name_of_block


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """A prefix on its way here. The first `num_shared` of its blocks were here already."""

    blocks: tuple[int, ...]
    num_shared: int
    hashes: tuple[bytes, ...]
    names: tuple[int, ...]  # of `cache_log`


class Loans:
    """Owned by an Engine. `prefix_blocks`: a prefix that is here counts in multiples of so many blocks."""

    def __init__(self, pool: BlockPool, leases: LeaseBook, prefix_blocks: int) -> None:
        self._pool = pool
        self._leases = leases
        self._prefix_blocks = prefix_blocks
        self._coming: set[Loan] = set()

    def __iter__(self) -> Iterator[Loan]:
        return iter(self._coming)

    def lend(self, key: str, tokens: Sequence[int], now_s: float, salt: str = "") -> Lease | None:
        """Keep what the cache has of this beginning for one reader, under a lease of this key. None: it has nothing."""
        hashes = prefix_hashes(tokens, self._pool.block_size, salt=salt)
        return self._leases.lend(key, self._pool.match(hashes), now_s)

    def known(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that are here of this beginning, as far as they count, with one more reference each."""
        shared = self._pool.match(hashes)
        aligned = len(shared) - len(shared) % self._prefix_blocks
        self._pool.free(shared[aligned:])
        return shared[:aligned]

    def borrow(self, tokens: Sequence[int], salt: str = "") -> Loan:
        """Blocks for a beginning that another worker lends. Raises `OutOfBlocks` and changes nothing."""
        hashes = prefix_hashes(tokens, self._pool.block_size, salt=salt)
        shared = self.known(hashes)
        aligned = len(shared)
        try:
            fresh = self._pool.allocate(-(-len(tokens) // self._pool.block_size) - aligned)
        except OutOfBlocks:
            self._pool.free(shared)
            raise
        loan = Loan((*shared, *fresh), aligned, tuple(hashes), tuple(chain(tokens, salt=salt)))
        self._coming.add(loan)
        return loan

    def end(self, loan: Loan, *, arrived: bool) -> None:
        """Its bytes are here, verified, or will not come; either way nobody but the cache keeps the blocks."""
        self._coming.remove(loan)
        if arrived:
            for index in range(loan.num_shared, len(loan.hashes)):
                told = name_of_block(loan.names, index, self._pool.block_size)
                self._pool.name(loan.blocks[index], loan.hashes[index], told)
        self._pool.free(loan.blocks)
