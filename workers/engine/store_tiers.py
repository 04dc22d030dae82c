"""What steps save in host memory is also written to stores, and where a store has a block, the KV event log says so.

    device ──a step saves──> host ──the step has ended──> stores ──`prefetch` reads──> host

Pure.
"""

from collections.abc import Callable, Iterable
from functools import partial

from msgspec import structs

from workers.engine.block_store import BlockStore
from workers.engine.blocks import BlockPool
from workers.engine.read_speed import ReadSpeed
from workers.stats import TierStats

READS_AT_ONCE = 8  # of a store: more are of no use when a prompt changes the direction in which it reads
READ_TIMEOUT_S = 1.0


class StoreTier:
    """One store. Owned by an Engine."""

    def __init__(self, store: BlockStore, pool: BlockPool) -> None:
        self.tier = store.tier
        self.find = store.find
        self.forget = store.forget
        self.speed = ReadSpeed(store.read_byte_s * pool.block_bytes)
        self.num_reading = 0
        self._store = store
        self._pool = pool
        pool.hits.read_byte_s[store.tier.value] = store.read_byte_s
        self._prefixes = store.watch(self._added, self._gone)
        for prefix in self._prefixes.values():
            pool.log.add(self.tier, prefix)

    @property
    def is_free(self) -> bool:
        """Whether another read makes sense."""
        return self.num_reading < READS_AT_ONCE

    def read(self, block_hash: bytes, block: int, now_s: float, done: Callable[[bool, float], None]) -> None:
        """See `BlockStore.read`."""
        if not self.num_reading:
            self.speed.begin(now_s)
        self.num_reading += 1

        def ended(arrived: bool, seconds: float) -> None:
            self.num_reading -= 1
            if arrived or seconds >= READ_TIMEOUT_S:
                self.speed.ended(1, now_s + seconds)
            else:
                self.speed.begin(now_s + seconds)
            done(arrived, seconds)

        self._store.read(block_hash, block, READ_TIMEOUT_S, ended)

    def save(self, saved: Iterable[tuple[bytes, int]]) -> None:
        """A step has saved these in host memory."""
        host = self._pool.host
        for block_hash, block in saved:
            if host.block_of(block_hash) == block:  # not forgotten since
                host.hold(block)
                prefix = host.prefix_of(block_hash)
                self._store.write(block_hash, prefix, block, partial(self._written, block_hash, prefix, block))

    def _written(self, block_hash: bytes, prefix: int | None, block: int, is_there: bool) -> None:
        self._pool.host.release(block)
        if prefix is not None and is_there:
            self._added(block_hash, prefix)

    def _added(self, block_hash: bytes, prefix: int) -> None:
        self._prefixes[block_hash] = prefix
        self._pool.log.add(self.tier, prefix)

    def _gone(self, block_hash: bytes) -> None:
        prefix = self._prefixes.pop(block_hash, None)
        if prefix is not None:
            self._pool.log.remove(self.tier, prefix)

    def stats(self) -> TierStats:
        hits, name = self._pool.hits, self.tier.value
        return structs.replace(self._store.stats(), hit_tokens=hits.tokens[name], saved_s=hits.saved_s[name])
