"""The leases of one engine: KV held for one reader each, how far it is computed, and until when it is held.

Another hold of the same key gets a higher epoch, which fences off every reader of the older one. Pure: time is an
argument.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvtransfer.errors import LeaseLost
from workers.engine.blocks import BlockPool, Cached
from workers.engine.cache_hits import DEVICE, HOST
from workers.engine.host_tier import StepCopies
from workers.engine.sequence import Lease, Sequence

Digests: TypeAlias = Mapping[tuple[int, int], tuple[bytes, ...]]  # (block, slots) -> of its cells, on each rank


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


class LeaseManager:
    """Owned by an Engine. A lease holds one reference to each of its blocks."""

    def __init__(self, pool: BlockPool, ttl_s: float, *, digest: bool) -> None:
        self.expired = 0
        self.lent_tokens = Counter[str]()  # of cached prefixes that readers took, by tier
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

    def offer(
        self,
        key: str,
        blocks: list[int],
        now_s: float,
        restores: Mapping[int, Cached] | None = None,
        *,
        lends: bool = False,
    ) -> Lease:
        """Hold computed, full blocks for a reader, taking over their references: of the cache or a running sequence.

        `restores`: those that must be restored first, from these blocks of the host cache. The watermark stops before
        the first of them and, with digests on, before the first block without one. Once the reader has said what it
        has, the next steps restore and digest what it lacks.
        """
        self.drop(key)
        self._epoch += 1
        num_tokens = len(blocks) * self._pool.block_size
        lease = Lease(
            key, self._epoch, tuple(blocks), num_tokens, self._ttl_s, now_s + self._ttl_s, offered=True, lends=lends
        )
        lease.restores.update(restores or {})
        lease.num_restored = len(lease.restores)
        for kept in lease.restores.values():
            self._pool.host.hold(kept.block)
        self._leases[key] = lease
        self._advance_known(lease, num_tokens)
        lease.finished = len(lease.digests) == len(blocks)
        return lease

    def offer_held(self, key: str, blocks: Iterable[int], now_s: float) -> Lease:
        """As `offer`, with references of its own to blocks that others hold."""
        held = [*blocks]
        self._pool.share(held)
        return self.offer(key, held, now_s)

    def undigested(self, key: str, computed: int) -> list[tuple[int, int]]:
        """(block, slots with tokens) of a held prompt to digest once `computed` tokens have their KV; each once."""
        lease = self._leases.get(key)
        if lease is None or lease.offered or not self._digest:
            return []
        first = max(len(lease.digests), lease.num_asked)
        lease.num_asked = max(first, self._ready(lease, computed))
        return [(lease.blocks[index], self._slots(lease, index)) for index in range(first, lease.num_asked)]

    def offered(self, step: int, most: int, copies: StepCopies) -> list[tuple[int, int]]:
        """(block, slots) of up to `most` offered blocks for this step to digest; each is returned once.

        Those that must be restored before are added to its `copies`, also with digests off.
        """
        asked: list[tuple[int, int]] = []
        for lease in self._leases.values():
            first = max(len(lease.digests), lease.num_asked)
            last = min(len(lease.blocks), first + most - len(asked))
            if lease.is_read and first < last:
                lease.num_asked, lease.first_step = last, lease.first_step or step
                for block in lease.blocks[first:last]:
                    asked.append((block, self._pool.block_size))
                    if block in lease.restores:
                        copies.restore(self._pool, lease.restores[block].block, block)
        return asked if self._digest else []

    def advance(self, sequence: Sequence, digests: Digests) -> None:
        """Move a held prompt's watermark up to what is computed. `digests` are those of the step just done."""
        lease = self._leases.get(sequence.key)
        if lease is not None and not lease.offered:
            self._advance(lease, sequence.num_computed, digests)

    def advance_offers(self, step: int, digests: Digests, restored: Iterable[tuple[int, int]] = ()) -> None:
        """Move the watermarks of offered blocks up to what this step and earlier ones have digested.

        `restored`: the pairs (host block, block) that it has restored.
        """
        here = {block for _, block in restored}
        for lease in self._leases.values():
            if lease.offered and 0 < lease.first_step <= step:
                for block in here & lease.restores.keys():
                    self._restored(lease, block)
                self._advance(lease, lease.num_tokens, digests)
                lease.finished = len(lease.digests) == len(lease.blocks)

    def steps_failed(self) -> None:
        """Withdraw offers that wait for digests: those that failed steps should have computed will not come."""
        for lease in [each for each in self if each.offered and not each.finished]:
            self.drop(lease.key)

    def _restored(self, lease: Lease, block: int) -> None:
        """The block holds its content, which is cached unless it has been forgotten meanwhile."""
        kept, host = lease.restores.pop(block), self._pool.host
        if host.block_of(kept.block_hash) == kept.block:
            self._pool.cache_block(block, kept.block_hash, kept.prefix)
        host.release(kept.block)

    def withdraw_restored(self) -> bool:
        """End the oldest offer that had blocks restored, since a running sequence needs one. False: there is none."""
        oldest = next((lease for lease in self if lease.num_restored), None)
        return oldest is not None and self.drop(oldest.key)

    @property
    def num_restored(self) -> int:
        """Blocks that offers hold because they were, or will be, restored for readers."""
        return sum(lease.num_restored for lease in self)

    def _advance(self, lease: Lease, computed: int, digests: Digests) -> None:
        ready = self._ready(lease, computed)
        if not self._digest and not lease.restores:
            lease.digests += [()] * (ready - len(lease.digests))
        for index in range(len(lease.digests), ready):
            block = lease.blocks[index]
            known = digests.get((block, self._slots(lease, index)), ())
            if block in lease.restores or (self._digest and not known):
                return  # a later step will digest it
            lease.digests.append(known)
            if known and self._pool.has_hash(block):
                self._pool.digests[block] = known

    def _advance_known(self, lease: Lease, computed: int) -> None:
        """Blocks that were digested under an earlier lease are ready at once."""
        for block in lease.blocks[len(lease.digests) : self._ready(lease, computed)]:
            known = self._pool.digests.get(block, ())
            if block in lease.restores or (self._digest and not known):
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
        if lease.offered and not lease.is_read:
            lease.is_read, lease.num_had = True, min(have, len(lease.blocks))
            lease.digests += [()] * (lease.num_had - len(lease.digests))  # it will not ask for these
            self._advance_known(lease, lease.num_tokens)
            lease.finished = len(lease.digests) == len(lease.blocks)
        fresh = lease.digests[have:]
        ranks = tuple(zip(*fresh, strict=True)) if fresh and fresh[0] else ()
        return Watermark(len(lease.digests), have, ranks, lease.finished, lease.ttl_s)

    def release(self, key: str, epoch: int) -> None:
        """The reader is done; success proves that the lease was valid until now. Raises `LeaseLost`."""
        lease = self._valid(key, epoch)
        if lease.lends:
            taken = len(lease.blocks) - lease.num_had
            from_host = min(taken, lease.num_restored)
            self.lent_tokens[HOST] += from_host * self._pool.block_size
            self.lent_tokens[DEVICE] += (taken - from_host) * self._pool.block_size
        self.drop(key)

    def drop(self, key: str) -> bool:
        """End a lease, if there is one."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._pool.free(lease.blocks)
            for kept in lease.restores.values():
                self._pool.host.release(kept.block)
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
