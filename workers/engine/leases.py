"""The leases of one engine: KV held for one reader each, how far it is computed, and until when it is held.

Another hold of the same key gets a higher epoch, which fences off every reader of the older one. Pure: time is an
argument.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvtransfer.errors import LeaseLost
from workers.engine.blocks import BlockPool
from workers.engine.sequence import Lease, Sequence


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far the KV under a lease is computed. `cells[rank][i]` are the digests of block first_block + i on that rank,
    as in `StepResult.digests`; no ranks without digests.
    """

    ready_blocks: int
    first_block: int
    cells: tuple[tuple[bytes, ...], ...]
    finished: bool
    ttl_s: float


class LeaseBook:
    """Owned by an Engine. A lease holds one reference to each of its blocks."""

    def __init__(self, pool: BlockPool, ttl_s: float, *, digest: bool) -> None:
        self.expired = 0
        self._pool = pool
        self._ttl_s = ttl_s
        self._digest = digest
        self._leases: dict[str, Lease] = {}
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def hold(self, sequence: Sequence, now_s: float) -> Lease:
        """Hold the blocks of an admitted prompt for a reader."""
        self.drop(sequence.key)
        self._epoch += 1
        blocks = tuple(sequence.blocks)
        self._pool.share(blocks)
        lease = Lease(sequence.key, self._epoch, blocks, len(sequence.tokens), self._ttl_s, now_s + self._ttl_s)
        self._leases[lease.key] = lease
        sequence.leased = True
        self._advance_known(lease, sequence.num_computed)
        return lease

    def hold_cached(self, key: str, blocks: list[int], now_s: float) -> Lease | None:
        """Hold cached blocks for a reader, taking over their references. None when there are none to read.

        With digests on, the blocks from the first one without a digest are released.
        """
        digests: list[tuple[bytes, ...]] = []
        for block in blocks:
            known = self._pool.digests.get(block, ())
            if self._digest and not known:
                break
            digests.append(known)
        held = tuple(blocks[: len(digests)])
        self._pool.free(blocks[len(held) :])
        if not held:
            return None
        self.drop(key)
        self._epoch += 1
        num_tokens = len(held) * self._pool.block_size
        lease = Lease(key, self._epoch, held, num_tokens, self._ttl_s, now_s + self._ttl_s, digests, finished=True)
        self._leases[key] = lease
        return lease

    def offer(self, key: str, blocks: list[int], now_s: float) -> Lease:
        """Hold full blocks of a running sequence for the target of its migration.

        With digests on, the watermark stops before the first block without one; later steps digest them.
        """
        self._pool.share(blocks)
        self.drop(key)
        self._epoch += 1
        num_tokens = len(blocks) * self._pool.block_size
        lease = Lease(key, self._epoch, tuple(blocks), num_tokens, self._ttl_s, now_s + self._ttl_s, offered=True)
        self._leases[key] = lease
        self._advance_known(lease, num_tokens)
        lease.finished = len(lease.digests) == len(blocks)
        return lease

    def undigested(self, key: str, computed: int, most: int) -> list[tuple[int, int]]:
        """(block, slots with tokens) under this lease to digest once `computed` tokens have their KV.

        Each is returned once; for a running sequence at most `most` at a time.
        """
        lease = self._leases.get(key)
        if lease is None or not self._digest:
            return []
        first, last = max(len(lease.digests), lease.num_asked), self._ready(lease, computed)
        lease.num_asked = max(first, min(last, first + most) if lease.offered else last)
        return [(lease.blocks[index], self._slots(lease, index)) for index in range(first, lease.num_asked)]

    def advance(self, sequence: Sequence, digests: Mapping[tuple[int, int], tuple[bytes, ...]]) -> None:
        """Move the watermark up to what is computed. `digests` are those of the step just done, on each rank."""
        lease = self._leases.get(sequence.key)
        if lease is None:
            return
        for index in range(len(lease.digests), self._ready(lease, sequence.num_computed)):
            block = lease.blocks[index]
            known = digests.get((block, self._slots(lease, index)), ())
            if self._digest and not known:
                return  # a later step will digest it
            lease.digests.append(known)
            if known and self._pool.is_named(block):
                self._pool.digests[block] = known
        if lease.offered:
            lease.finished = len(lease.digests) == len(lease.blocks)

    def _advance_known(self, lease: Lease, computed: int) -> None:
        """Blocks that were digested under an earlier lease are ready at once."""
        for block in lease.blocks[: self._ready(lease, computed)]:
            known = self._pool.digests.get(block, ())
            if self._digest and not known:
                return
            lease.digests.append(known)

    def _ready(self, lease: Lease, computed: int) -> int:
        """Blocks whose KV is complete; the last, partial one only when all leased tokens are computed."""
        if computed >= lease.num_tokens:
            return len(lease.blocks)
        return computed // self._pool.block_size

    def _slots(self, lease: Lease, index: int) -> int:
        """Slots of this block that hold tokens of the lease."""
        return min(self._pool.block_size, lease.num_tokens - index * self._pool.block_size)

    def finish(self, key: str) -> None:
        """The prompt is computed: the watermark is final."""
        if key in self._leases:
            self._leases[key].finished = True

    def progress(self, key: str, epoch: int, have: int, now_s: float) -> Watermark:
        """The watermark for a reader that has `have` blocks; extends the lease. Raises `LeaseLost`."""
        lease = self._valid(key, epoch)
        lease.deadline_s = now_s + lease.ttl_s
        fresh = lease.digests[have:]
        ranks = tuple(zip(*fresh, strict=True)) if fresh and fresh[0] else ()
        return Watermark(len(lease.digests), have, ranks, lease.finished, lease.ttl_s)

    def release(self, key: str, epoch: int) -> None:
        """The reader is done; success proves that the lease was valid until now. Raises `LeaseLost`."""
        self._valid(key, epoch)
        self.drop(key)

    def drop(self, key: str) -> bool:
        """End a lease, if there is one."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._pool.free(lease.blocks)
        return lease is not None

    def expire(self, now_s: float) -> list[Lease]:
        """End and return every lease past its deadline. Renewals break any order, so all are checked."""
        late = [lease for lease in self._leases.values() if lease.deadline_s <= now_s]
        for lease in late:
            self.drop(lease.key)
        self.expired += len(late)
        return late

    def _valid(self, key: str, epoch: int) -> Lease:
        lease = self._leases.get(key)
        if lease is None:
            raise LeaseLost(f"no lease {key}: it expired, was released, or its worker restarted; prefill again")
        if lease.epoch != epoch:
            raise LeaseLost(f"lease {key} is in epoch {lease.epoch}, the reader asks for {epoch}; prefill again")
        return lease
