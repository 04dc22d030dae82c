"""Saves prefixes to host memory and restores them, as copies of whole blocks in a step. See `host_cache`.

Restored tokens count as scheduled, like computed ones: they have their KV when the step has ended, and no lease,
migration or block hash exposes them before.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from workers.engine.blocks import BlockPool, Cached
from workers.engine.cache_hits import HOST
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence
from workers.engine.step import Chunk, StepPlan
from workers.stats import TierStats

AHEAD = 4  # steps' worth of blocks that are saved before they are needed


@dataclass(slots=True)
class StepCopies:
    """The copies of one step: (block, host block) pairs out, (host block, block) pairs in, then (source, target) pairs
    within the pool.

    `leaving`: blocks to free when the step has ended. `evicted`: content of blocks that it will overwrite. `saving`:
    cached blocks that are held until they are saved. `restored`: sequences and how many of their tokens it restores.
    `saved`: what it copies into which blocks of the host cache. `held`: blocks of the host cache that it uses.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    within_pool: list[tuple[int, int]] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    evicted: list[Cached] = field(default_factory=list)
    saving: list[int] = field(default_factory=list)
    restored: list[tuple[Sequence, int]] = field(default_factory=list)
    saved: list[tuple[bytes, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    @property
    def use_blocks(self) -> bool:
        """Whether blocks are in use until the step has ended."""
        return bool(self.leaving or self.saving or self.held or self.swap_out or self.swap_in)

    def restore(self, pool: BlockPool, host_block: int, block: int) -> None:
        """Restore a block, and hold both until the step has ended."""
        pool.share([block])
        pool.host.hold(host_block)
        self.swap_in.append((host_block, block))
        self.leaving.append(block)
        self.held.append(host_block)

    def plan(self, number: int, chunks: Items[Chunk], digests: Iterable[tuple[int, int]]) -> StepPlan:
        """A step with these copies. A block that two held prompts share is digested once."""
        once = tuple(dict.fromkeys(digests))
        return StepPlan(number, tuple(chunks), once, tuple(self.swap_out), tuple(self.swap_in), tuple(self.within_pool))

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy blocks in this step, and free the sources when it has ended."""
        self.within_pool += zip(sources, targets, strict=True)
        self.leaving += sources


class HostTier:
    """Owned by a Scheduler. `step_blocks`: the most that a step may fill."""

    def __init__(self, pool: BlockPool, estimate: StepEstimate, step_blocks: int) -> None:
        self._pool = pool
        self._estimate = estimate
        self._step_blocks = step_blocks
        self._saved: list[tuple[bytes, int]] = []
        self._num_saved = self._num_restored = self._num_dropped = 0  # blocks

    def stats(self) -> TierStats:
        host, size = self._pool.host, self._pool.block_bytes
        return TierStats(
            "host",
            blocks=len(host),
            capacity_blocks=host.num_blocks,
            block_bytes=size,
            hit_tokens=self._pool.hits.tokens[HOST],
            saved_s=self._pool.hits.saved_s[HOST],
            pinned_blocks=host.num_pinned,
            read_bytes=self._num_restored * size,
            written_bytes=self._num_saved * size,
            dropped_blocks=self._num_dropped,
        )

    def restore(self, sequence: Sequence, copies: StepCopies) -> None:
        """Restore what follows the sequence's scheduled tokens, if that is cheaper than computing it.

        It already has its blocks. At least one token is left to compute, and all of them for prompt log probabilities.
        """
        host, size, first = self._pool.host, self._pool.block_size, sequence.num_scheduled
        if not len(host) or sequence.wants_prompt_rows or first % size:
            return
        num_tokens, index = len(sequence.tokens), first // size
        kept = host.match(sequence.block_hashes[index : (num_tokens - 1) // size])
        end = first + len(kept) * size
        if not kept or not self._is_cheaper(len(kept), num_tokens, first, end):
            return
        copies.swap_in += zip(kept, sequence.blocks[index : index + len(kept)], strict=True)
        self._hold(kept, copies)
        copies.restored.append((sequence, end - first))
        sequence.num_inflight_tokens += end - first
        sequence.cached_tokens += end - first

    def _is_cheaper(self, num_blocks: int, num_tokens: int, first: int, end: int) -> bool:
        """Half of a swap's cost is the way back."""
        cost = self._estimate.cost
        saved_s = cost.prefill_seconds(num_tokens - first, first) - cost.prefill_seconds(num_tokens - end, end)
        return cost.swap_seconds(num_blocks * self._pool.block_bytes) / 2 < saved_s

    def _is_worth_saving(self) -> bool:
        """Whether swapping a step's worth of blocks out and in is faster than computing them."""
        cost, count = self._estimate.cost, self._step_blocks
        return cost.swap_seconds(count * self._pool.block_bytes) < cost.prefill_seconds(count * self._pool.block_size)

    def save(self, copies: StepCopies) -> None:
        """Save what this step evicts and, where there is room, what transfers may evict without a step; then pins."""
        host = self._pool.host
        if not host.num_blocks:
            return
        going = copies.evicted
        if self._is_worth_saving():
            most = min(self._step_blocks, self._pool.num_free // 2)
            ahead = self._pool.hold_oldest(most, AHEAD * self._step_blocks)
            copies.saving += [each.block for each in ahead]
            going = [*going, *ahead]
        else:
            going = [each for each in going if each.block_hash in host.pins]
            self._num_dropped += len(copies.evicted) - len(going)
        self._save(going, copies)
        self.save_pinned(copies)

    def save_pinned(self, copies: StepCopies) -> None:
        """Save what is pinned and on the device, as many blocks as a step may fill."""
        held = self._pool.hold_unsaved(self._step_blocks)
        copies.leaving += [each.block for each in held]
        self._save(held, copies)

    def _save(self, going: list[Cached], copies: StepCopies) -> None:
        host, busy = self._pool.host, {block for block, _ in copies.swap_in}
        for each in going:
            if each.block_hash in host:
                continue
            target = host.save(each.block_hash, each.prefix, busy)
            if target is None:
                self._num_dropped += 1
                continue
            copies.swap_out.append((each.block, target))
            copies.saved.append((each.block_hash, target))
            self._hold([target], copies)

    def _hold(self, blocks: list[int], copies: StepCopies) -> None:
        for block in blocks:
            self._pool.host.hold(block)
        copies.held += blocks

    def take_saved(self) -> list[tuple[bytes, int]]:
        """(block hash, host block) of what ended steps have saved since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def commit_copies(self, copies: StepCopies) -> None:
        """The step has ended."""
        self._pool.free_oldest(copies.saving)
        for block in copies.held:
            self._pool.host.release(block)
        self._saved += copies.saved
        self._num_saved += len(copies.saved)
        self._num_restored += len(copies.held) - len(copies.saved)
        for sequence, num_tokens in copies.restored:
            sequence.num_computed += num_tokens
            sequence.num_inflight_tokens -= num_tokens
