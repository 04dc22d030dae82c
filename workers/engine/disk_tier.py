"""The prefix cache's third tier: what steps save in host memory is also written to a disk, and read back for prompts.

    device ──a step saves──> host ──the step has ended──> disk
    a prompt arrives, and its prefix goes on there ──it waits, blocks are read──> host, from where a step restores it

A prompt waits no longer than computing those tokens would take, and never more than `MOST_WAIT_S`. The cache log has
the names of what can be read. Pure.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

from msgspec import structs

from workers.engine.blocks import BlockPool, prefix_hashes
from workers.engine.cache_log import Tier
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence
from workers.kv_events import chain, name_of_block
from workers.stats import TierStats

MOST_WAIT_S = 1.0  # of a prompt for its blocks


class Disk(Protocol):
    """Blocks on a disk, by their content hash. All calls return at once; whatever fails is a miss.

    `read_byte_s`: seconds to read a byte, of several blocks at once.
    """

    read_byte_s: float

    def watch(self, gone: Callable[[bytes], None]) -> dict[bytes, int]:
        """The prefix names of what is there, by content hash; the caller's.

        From now on `gone` is told each content hash that can no longer be read.
        """
        ...

    def match(self, names: Items[bytes]) -> int:
        """How many of the first names can be read."""
        ...

    def write(self, name: bytes, prefix: int | None, block: int, done: Callable[[], None]) -> None:
        """Store this host block, which stays as it is until `done`. `prefix`: the cache log's name for it."""
        ...

    def read(
        self, names: Items[bytes], blocks: Items[int], timeout_s: float, done: Callable[[Items[bool]], None]
    ) -> None:
        """Read into these host blocks. `done` is told in time which ones have arrived; the others are as before."""
        ...

    def forget(self, names: Iterable[bytes]) -> None:
        """The content of these is in doubt."""
        ...

    def stats(self) -> TierStats:
        """Without `hit_tokens`."""
        ...


class DiskTier:
    """Owned by an Engine. `block_bytes`: KV bytes of a block."""

    def __init__(self, disk: Disk, pool: BlockPool, estimate: StepEstimate, block_bytes: int) -> None:
        self._disk = disk
        self._pool = pool
        self._estimate = estimate
        self._block_bytes = block_bytes
        self._prefixes = disk.watch(self._gone)
        for prefix in self._prefixes.values():
            pool.log.add(Tier.DISK, prefix)

    def save(self, saved: Iterable[tuple[bytes, int]]) -> None:
        """A step has saved these in host memory."""
        host = self._pool.host
        for name, block in saved:
            if host.block_of(name) == block:  # not forgotten since
                host.hold(block)
                prefix = host.prefix_of(name)
                self._disk.write(name, prefix, block, partial(self._written, name, prefix, block))

    def _written(self, name: bytes, prefix: int | None, block: int) -> None:
        self._pool.host.release(block)
        if prefix is not None and self._disk.match([name]):  # it may be gone already
            self._prefixes[name] = prefix
            self._pool.log.add(Tier.DISK, prefix)

    def _gone(self, name: bytes) -> None:
        prefix = self._prefixes.pop(name, None)
        if prefix is not None:
            self._pool.log.remove(Tier.DISK, prefix)

    def stats(self) -> TierStats:
        return structs.replace(self._disk.stats(), hit_tokens=self._pool.disk_tokens)

    def prefetch(self, sequence: Sequence) -> None:
        """Read what continues the prompt's prefix, if that is cheaper than computing it. The prompt waits meanwhile."""
        size, num_tokens = self._pool.block_size, len(sequence.tokens)
        if sequence.request.fresh or sequence.wants_prompt_logprobs:
            return
        sequence.hashes = prefix_hashes(sequence.tokens, size, salt=sequence.salt)
        names = sequence.hashes[: (num_tokens - 1) // size]
        host = self._pool.host
        num_here = self._pool.num_known(names)
        num_here += len(host.match(names[num_here:]))
        count = min(self._disk.match(names[num_here:]), host.num_blocks // 2)
        wait_s = self._worth_s(num_tokens, num_here * size, count)
        blocks = host.load(names[num_here : num_here + count]) if wait_s > 0 else []
        if not blocks:
            return
        sequence.chain = chain(sequence.tokens, salt=sequence.salt)
        prefixes = [name_of_block(sequence.chain, num_here + place, size) for place in range(len(blocks))]

        def done(arrived: Items[bool]) -> None:
            for block, prefix, has_arrived in zip(blocks, prefixes, arrived, strict=True):
                host.loaded(block, prefix, arrived=has_arrived)
            sequence.from_disk = tuple([num_here + place for place, has_arrived in enumerate(arrived) if has_arrived])
            sequence.is_prefetching = False

        sequence.is_prefetching = True
        self._disk.read(names[num_here : num_here + len(blocks)], blocks, wait_s, done)

    def _worth_s(self, num_tokens: int, first: int, count: int) -> float:
        """How long the prompt may wait for `count` blocks from token `first` on."""
        cost, end = self._estimate.cost, first + count * self._pool.block_size
        saved_s = cost.prefill_seconds(num_tokens - first, first) - cost.prefill_seconds(num_tokens - end, end)
        return min(saved_s - cost.swap_seconds(count * self._block_bytes) / 2, MOST_WAIT_S)
