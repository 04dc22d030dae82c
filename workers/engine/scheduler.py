"""Which tokens the next step computes: iteration-level batching with token-budget chunked prefill.

Decodes go first, one token each; what is left of the budget goes to prompt chunks, first come first served (Orca's
iteration-level scheduling, OSDI'22; chunking as in Sarathi-Serve, OSDI'24). Out of blocks, the youngest sequence is
preempted and recomputed later. Pure: no clock, no device.
"""

from collections import deque
from dataclasses import dataclass

from workers.config import EngineConfig
from workers.engine.blocks import BlockPool, prefix_hashes
from workers.engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` tokens of a sequence, from its `num_computed` on. `admitted`: it got its blocks in this step."""

    sequence: Sequence
    count: int
    admitted: bool = False


class Scheduler:
    """Owns the queues. Shares the BlockPool with its Engine."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._config = config
        self._pool = pool

    def schedule(self) -> list[Slice]:
        """Decodes first, then chunks. Sequences in flight are left alone."""
        decodes = self._decodes()
        return decodes + self._chunks(self._config.max_batch_tokens - len(decodes))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whichever queue it is in."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)

    def _decodes(self) -> list[Slice]:
        slices: list[Slice] = []
        for sequence in list(self.running):
            if sequence.in_flight or sequence.state is not State.RUNNING or not sequence.is_decoding:
                continue
            if len(slices) == self._config.max_batch_tokens:
                break
            if self._grow(sequence, chosen=slices):
                slices.append(Slice(sequence, 1))
        return slices

    def _grow(self, sequence: Sequence, chosen: list[Slice]) -> bool:
        """Give the sequence a block for its newest token, preempting younger ones, or at last itself."""
        if sequence.num_computed < len(sequence.blocks) * self._pool.block_size:
            return True
        busy = {id(each.sequence) for each in chosen}
        while not self._pool.num_free:
            # The youngest goes first; a held prompt is never preempted: a reader may be half way through it.
            victims = [s for s in self.running if not (s.in_flight or s.hold or id(s) in busy)]
            victim = max(victims, key=lambda s: s.arrival_s, default=sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._pool.free(sequence.blocks)
        sequence.blocks, sequence.num_computed, sequence.num_named = [], 0, 0
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _chunks(self, budget: int) -> list[Slice]:
        slices: list[Slice] = []
        for sequence in self.running:
            missing = len(sequence.tokens) - sequence.num_computed
            if budget <= 0:
                return slices
            if sequence.in_flight or sequence.is_decoding:
                continue
            count = min(budget, missing)
            slices.append(Slice(sequence, count))
            budget -= count
        while budget > 0 and self.waiting and len(self.running) < self._config.max_running:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state = State.RUNNING
            count = min(budget, len(sequence.tokens) - sequence.num_computed)
            slices.append(Slice(sequence, count, admitted=True))
            budget -= count
        return slices

    def _admit(self, sequence: Sequence) -> bool:
        """Blocks for all tokens the sequence has, known prefixes shared. One block a running decode stays free."""
        sequence.hashes = prefix_hashes(sequence.tokens, self._pool.block_size, sequence.hashes)
        if sequence.request.fresh:
            self._pool.forget(sequence.hashes)
        # At least one token is computed, for its logits.
        usable = (len(sequence.tokens) - 1) // self._pool.block_size
        shared = self._pool.match(sequence.hashes[:usable])
        total = -(-len(sequence.tokens) // self._pool.block_size)
        spare = len(self.running) if not sequence.hold else 0
        if total - len(shared) + spare > self._pool.num_free:
            self._pool.free(shared)
            return False
        sequence.blocks = shared + self._pool.allocate(total - len(shared))
        sequence.num_computed = sequence.cached_tokens = len(shared) * self._pool.block_size
        sequence.num_named = len(shared)
        return True
