"""When prefixes go to host memory and when they come back: each a copy of whole blocks by a step. See `host_cache`.

Tokens that a step brings back are ordered, as tokens that it computes are: they have their KV when it has ended, and
until then no lease, hand-over or name of theirs lets anybody read them.
"""

from dataclasses import dataclass, field

from workers.engine.blocks import BlockPool, Cached
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence

AHEAD = 4  # steps' worth of blocks that are saved before they are wanted


@dataclass(slots=True)
class BlockMoves:
    """What one step copies: (block, host block) pairs out, (host block, block) pairs in, then (source, target) pairs
    within the pool.

    `leaving`: blocks to free when it has ended. `evicted`: what stands in blocks that the step will write. `saving`:
    cached blocks that are held until they are saved. `restored`: tokens of sequences that it brings back.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    evicted: list[Cached] = field(default_factory=list)
    saving: list[int] = field(default_factory=list)
    restored: list[tuple[Sequence, int]] = field(default_factory=list)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy blocks in this step, and let go of the sources when it has ended."""
        self.copies += zip(sources, targets, strict=True)
        self.leaving += sources


class HostTier:
    """Owned by a Scheduler. `block_bytes`: of one block's KV. `step_blocks`: as many as a step may fill."""

    def __init__(self, pool: BlockPool, estimate: StepEstimate, block_bytes: int, step_blocks: int) -> None:
        self._pool = pool
        self._estimate = estimate
        self._block_bytes = block_bytes
        self._step_blocks = step_blocks

    def restore(self, sequence: Sequence, moves: BlockMoves) -> None:
        """Bring back what follows the sequence's computed tokens, if that takes less than computing it again.

        It has its blocks already. One token at least is left to compute, and all where the prompt's own are wanted.
        """
        host, size, first = self._pool.host, self._pool.block_size, sequence.num_computed
        if not len(host) or sequence.wants_prompt_logprobs:
            return
        num_tokens, index = len(sequence.tokens), first // size
        kept = host.match(sequence.hashes[index : (num_tokens - 1) // size])
        end = first + len(kept) * size
        if not kept or not self._is_cheaper(len(kept), num_tokens, first, end):
            return
        moves.swap_in += zip(kept, sequence.blocks[index : index + len(kept)], strict=True)
        moves.restored.append((sequence, end - first))
        sequence.num_ordered += end - first
        sequence.cached_tokens = end

    def _is_cheaper(self, num_blocks: int, num_tokens: int, first: int, end: int) -> bool:
        """Half of what a swap costs is the way back."""
        cost = self._estimate.cost
        saved_s = cost.prefill_seconds(num_tokens - first, first) - cost.prefill_seconds(num_tokens - end, end)
        return cost.swap_seconds(num_blocks * self._block_bytes) / 2 < saved_s

    def _is_worth_saving(self) -> bool:
        """Whether a step's worth of blocks goes to the host and comes back in less time than it takes to compute."""
        cost, count = self._estimate.cost, self._step_blocks
        return cost.swap_seconds(count * self._block_bytes) < cost.prefill_seconds(count * self._pool.block_size)

    def save(self, moves: BlockMoves) -> None:
        """Copy what this step evicts; and ahead, as far as there is room, what transfers may evict without a step."""
        host = self._pool.host
        if not host.num_blocks or not self._is_worth_saving():
            return
        busy = {block for block, _ in moves.swap_in}
        most = min(self._step_blocks, self._pool.num_free // 2)
        ahead = self._pool.hold_oldest(most, AHEAD * self._step_blocks)
        moves.saving += [each.block for each in ahead]
        for each in (*moves.evicted, *ahead):
            if each.name in host:
                continue
            target = host.save(each.name, each.prefix, busy)
            if target is not None:
                moves.swap_out.append((each.block, target))

    def land(self, moves: BlockMoves) -> None:
        """The step has ended."""
        self._pool.free_oldest(moves.saving)
        for sequence, num_tokens in moves.restored:
            sequence.num_computed += num_tokens
            sequence.num_ordered -= num_tokens
