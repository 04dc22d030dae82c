"""What lies behind host memory: blocks that steps save there are also written to stores, and read back for prompts.

    device ──a step saves──> host ──the step has ended──> stores
    a prompt arrives, and its prefix goes on there ──it waits, blocks are read──> host, from where a step restores it

A prompt waits no longer than computing those tokens would take, and never more than `MOST_WAIT_S`. The cache log has
the names of what can be read. Pure.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import partial

from msgspec import structs

from workers.engine.block_store import BlockStore
from workers.engine.blocks import BlockPool, prefix_hashes
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence, State
from workers.kv_events import chain, name_of_block
from workers.stats import TierStats

MOST_WAIT_S = 1.0  # of a prompt for its blocks


class StoreTier:
    """What is written to one store, and where the cache log says so. Owned by StoreTiers."""

    def __init__(self, store: BlockStore, pool: BlockPool) -> None:
        self.store = store
        self._pool = pool
        pool.hits.read_byte_s[store.tier.value] = store.read_byte_s
        self._prefixes = store.watch(self._added, self._gone)
        for prefix in self._prefixes.values():
            pool.log.add(store.tier, prefix)

    def save(self, name: bytes, block: int) -> None:
        host = self._pool.host
        host.hold(block)
        prefix = host.prefix_of(name)
        self.store.write(name, prefix, block, partial(self._written, name, prefix, block))

    def _written(self, name: bytes, prefix: int | None, block: int, is_there: bool) -> None:
        self._pool.host.release(block)
        if prefix is not None and is_there:
            self._added(name, prefix)

    def _added(self, name: bytes, prefix: int) -> None:
        self._prefixes[name] = prefix
        self._pool.log.add(self.store.tier, prefix)

    def _gone(self, name: bytes) -> None:
        prefix = self._prefixes.pop(name, None)
        if prefix is not None:
            self._pool.log.remove(self.store.tier, prefix)

    def stats(self) -> TierStats:
        hits, name = self._pool.hits, self.store.tier.value
        return structs.replace(self.store.stats(), hit_tokens=hits.tokens[name], saved_s=hits.saved_s[name])


class StoreTiers:
    """Owned by an Engine. The first store that has a block is asked for it. `block_bytes`: KV bytes of a block."""

    def __init__(self, stores: Items[BlockStore], pool: BlockPool, estimate: StepEstimate, block_bytes: int) -> None:
        self._tiers = [StoreTier(store, pool) for store in stores]
        self._pool = pool
        self._estimate = estimate
        self._block_bytes = block_bytes

    def save(self, saved: Iterable[tuple[bytes, int]]) -> None:
        """A step has saved these in host memory."""
        host = self._pool.host
        for name, block in saved:
            if host.block_of(name) == block:  # not forgotten since
                for tier in self._tiers:
                    tier.save(name, block)

    def forget(self, names: Items[bytes]) -> None:
        """The content of these is in doubt."""
        for tier in self._tiers:
            tier.store.forget(names)

    def stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self._tiers)

    def prefetch(self, sequence: Sequence) -> None:
        """Read what continues the prompt's prefix, if that is cheaper than computing it. The prompt waits meanwhile."""
        size, num_tokens = self._pool.block_size, len(sequence.tokens)
        if not self._tiers or sequence.request.fresh or sequence.wants_prompt_logprobs:
            return
        sequence.hashes = prefix_hashes(sequence.tokens, size, salt=sequence.salt)
        names = sequence.hashes[: (num_tokens - 1) // size]
        host = self._pool.host
        num_here = self._pool.num_known(names)
        num_here += len(host.match(names[num_here:]))
        counts: dict[StoreTier, int] = {}

        def found(tier: StoreTier, count: int) -> None:
            counts[tier] = count
            if len(counts) == len(self._tiers):
                self._read(sequence, num_here, names[num_here:], [counts[each] for each in self._tiers])

        sequence.is_prefetching = True
        for tier in self._tiers:
            tier.store.find(names[num_here:], MOST_WAIT_S, partial(found, tier))

    def _read(self, sequence: Sequence, first: int, names: Items[bytes], counts: Items[int]) -> None:
        """Read the first of these names, `counts` of which the stores have. They are blocks `first` ..."""
        host, size = self._pool.host, self._pool.block_size
        count = min(max(counts), host.num_blocks // 2)
        wait_s = self._worth_s(len(sequence.tokens), first * size, count)
        blocks = host.load(names[:count]) if wait_s > 0 and sequence.state is not State.FINISHED else []
        sequence.is_prefetching = bool(blocks)
        if not blocks:
            return
        sequence.chain = chain(sequence.tokens, salt=sequence.salt)
        left = set(range(len(blocks)))

        def read(place: int, after: int = -1) -> None:
            """From the first store behind `after` that has it."""
            having = (number for number, most in enumerate(counts) if number > after and place < most)
            number = next(having, None)
            if number is None:
                return end(place, False)

            def done(arrived: bool, seconds: float) -> None:
                if arrived:
                    sequence.from_stores[first + place] = self._tiers[number].store.tier
                    end(place, True)
                else:
                    read(place, number)

            self._tiers[number].store.read(names[place], blocks[place], wait_s, done)

        def end(place: int, arrived: bool) -> None:
            host.loaded(blocks[place], name_of_block(sequence.chain, first + place, size), arrived=arrived)
            left.remove(place)
            sequence.is_prefetching = bool(left)

        for place in range(len(blocks)):
            read(place)

    def _worth_s(self, num_tokens: int, first: int, count: int) -> float:
        """How long the prompt may wait for `count` blocks from token `first` on."""
        cost, end = self._estimate.cost, first + count * self._pool.block_size
        saved_s = cost.prefill_seconds(num_tokens - first, first) - cost.prefill_seconds(num_tokens - end, end)
        return min(saved_s - cost.swap_seconds(count * self._block_bytes) / 2, MOST_WAIT_S)
