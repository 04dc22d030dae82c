"""The steps of one engine: what the next one holds, and which are in flight.

A batching policy decides what a step computes (`batching`), a `StepBuilder` makes it so, with the sequences of `Queues`
and the blocks of a `KVCacheManager`. Several steps may be in flight, one for each stage of a pipeline; they run in
order, and nobody in them is preempted. Pure: no clock, no device.
"""

import sys
from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from workers.config import EngineConfig
from workers.engine.batching import batching
from workers.engine.blocks import BlockPool
from workers.engine.estimate import StepEstimate, prompt_share
from workers.engine.host_tier import BlockMoves
from workers.engine.kv_cache import KVCacheManager
from workers.engine.leases import LeaseBook
from workers.engine.queues import Queues
from workers.engine.sequence import Sequence, State
from workers.engine.step_builder import StepBuilder


@dataclass(slots=True)
class _Flight:
    """A step in flight: the sequences whose blocks it touches, and the copies that it makes."""

    sequences: tuple[Sequence, ...]
    moves: BlockMoves


class Scheduler:
    """Owns the queues and who holds which blocks. Shares the pool, the leases and the estimate with its Engine.

    `block_bytes`: of one block's KV. `depth`: how many steps are to be in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        leases: LeaseBook,
        estimate: StepEstimate,
        *,
        block_bytes: int,
        depth: int,
    ) -> None:
        self._policy = batching(config.batching, tpot_slo_s=config.tpot_slo_s, block_size=config.block_size)
        self.queues = Queues(config, estimate)
        self.kv = KVCacheManager(
            config,
            pool,
            estimate,
            self.queues.running,
            block_bytes=block_bytes,
            reserves_answer=self._policy.reserves_answer,
        )
        self._max_batch_tokens = config.max_batch_tokens
        self._block_size = config.block_size
        self._leases = leases
        self._estimate = estimate
        self._depth = depth
        self._flights: deque[_Flight] = deque()
        self._steps = 0

    def schedule(self, now_s: float) -> StepBuilder | None:
        """What the next step computes and copies; None when that is nothing.

        With an `error` it computes nothing: it is in flight only so that whoever it has touched fails when it lands.
        """
        if not self.queues.running and not self.queues.waiting:
            return None
        decodable, unfinished, ordered = self._sorted()
        step = StepBuilder(
            self.queues,
            self.kv,
            self._leases,
            self._estimate,
            now_s=now_s,
            decodable=tuple(decodable),
            unfinished=tuple(unfinished),
            beside=[each for each in ordered if each.num_computed >= each.num_given],
            rows=self._rows(len(decodable), len(decodable) + len(ordered)),
            budget=self._max_batch_tokens,
            share=self._prompt_share(),
            coming=sum(len(each.moves.leaving) + len(each.moves.saving) for each in self._flights),
        )
        try:
            self._policy.compose(step)
        except Exception as error:
            step.error = error
            if step.at_hand is None:  # no sequence to fail: it would repeat forever
                raise
            step.admitted.append(step.at_hand)
            self._take_off(step)
            return step
        if step.is_empty:
            return None
        self.kv.tier.save(step.moves)
        self._take_off(step)
        return step

    def _sorted(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Of those who run: who decodes, who has prompt tokens still to order, and whose tokens are all in flight."""
        decodable: list[Sequence] = []
        unfinished: list[Sequence] = []
        ordered: list[Sequence] = []
        for each in self.queues.running:
            if each.doomed:
                continue
            num_tokens = len(each.tokens)
            num_missing = num_tokens - each.num_computed - each.num_ordered
            if num_missing == 0:
                ordered.append(each)
            elif num_missing == 1 and num_tokens > each.num_given:
                decodable.append(each)
            else:
                unfinished.append(each)
        if self._depth > 1:
            decodable.sort(key=lambda each: each.last_step)
        return decodable, unfinished, ordered

    def _rows(self, num_ready: int, num_decoding: int) -> int:
        """How many decodes the next step takes: an equal part for each step that is to be in flight.

        The bound over all keeps groups from growing together when others end; the one over those who are ready deals
        them out when nothing is in flight yet.
        """
        num_free = max(1, self._depth - len(self._flights))
        return min(-(-num_decoding // self._depth), -(-num_ready // num_free))

    def _prompt_share(self) -> int:
        """Prompt tokens that the next step takes so that other stages have some too, of all that are here."""
        if self._depth == 1:
            return sys.maxsize
        prompts = [each for each in self.queues.running if each.is_prefilling]
        num_tokens = sum(len(each.tokens) for each in (*prompts, *self.queues.waiting))
        return prompt_share(self._estimate.cost, num_tokens, self._depth)

    def _take_off(self, step: StepBuilder) -> None:
        self._steps += 1
        # The kernels want one-token runs first.
        step.slices.sort(key=lambda each: each.count > 1)
        touched = tuple(dict.fromkeys([*[each.sequence for each in step.slices], *step.admitted]))
        for sequence in touched:
            sequence.in_flight += 1
            sequence.last_step = self._steps
        self._flights.append(_Flight(touched, step.moves))

    def land(self) -> Items[Sequence]:
        """The oldest step in flight has ended, and its copies with it. Answers the sequences it touched."""
        flight = self._flights.popleft()
        self.kv.land(flight.moves)
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        return flight.sequences

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def leaving(self) -> Items[Items[int]]:
        """Blocks that no sequence owns any more, but that steps in flight still read."""
        return [flight.moves.leaving + flight.moves.saving for flight in self._flights]

    def not_saved(self, host_blocks: Items[int]) -> None:
        """The step that was to save these failed: those who count on them compute their tokens again."""
        self.kv.not_saved(host_blocks, [each for each in self.queues.waiting if each.state is State.SWAPPED])

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whichever queue it is in, and give its blocks back."""
        self.queues.remove(sequence)
        self.kv.release(sequence)

    def check(self) -> None:
        """Prove that host blocks balance, and that what is in flight is what the steps hold. Raises AssertionError."""
        running, waiting = self.queues.running, self.queues.waiting
        self.kv.host.check([each.host_blocks for each in waiting])
        touched = Counter(each.key for flight in self._flights for each in flight.sequences)
        assert touched == Counter({each.key: each.in_flight for each in running if each.in_flight}), "flights"
        assert not any(each.in_flight or each.num_ordered for each in waiting), "somebody waits in flight"
        for each in running:
            assert each.num_scheduled <= min(len(each.tokens), len(each.blocks) * self._block_size), each.key
            assert each.in_flight or not each.num_ordered, f"tokens of {each.key} are ordered, but from nobody"
