"""Builds the steps of one engine and tracks those in flight.

A batching policy (`batching`) decides what a step computes and a `StepBuilder` builds it, from the sequences in
`Queues` and the blocks of a `KVCacheManager`. Several steps may be in flight, one for each pipeline stage; they run in
order, and their sequences are not preempted. Pure: no clock, no device.
"""

import sys
from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from workers.config import EngineConfig
from workers.engine.batching import batching
from workers.engine.blocks import BlockPool
from workers.engine.estimate import StepEstimate, prompt_share
from workers.engine.host_tier import StepCopies
from workers.engine.kv_cache import KVCacheManager
from workers.engine.leases import LeaseManager
from workers.engine.prefetch import Prefetcher
from workers.engine.queues import Queues
from workers.engine.sequence import Sequence
from workers.engine.step_builder import StepBuilder


@dataclass(slots=True)
class _Flight:
    """A step in flight: the sequences whose blocks it uses, and its block copies."""

    sequences: tuple[Sequence, ...]
    copies: StepCopies


class Scheduler:
    """Owns the queues and the block tables. Shares the pool, leases, prefetcher and estimate with its Engine.

    `depth`: number of steps to keep in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        leases: LeaseManager,
        prefetcher: Prefetcher,
        estimate: StepEstimate,
        *,
        depth: int,
    ) -> None:
        self._policy = batching(config.batching, tpot_slo_s=config.tpot_slo_s, block_size=config.block_size)
        self.queues = Queues(config, estimate)
        reserves_answer = self._policy.reserves_answer
        self.kv = KVCacheManager(config, pool, estimate, self.queues.running, reserves_answer=reserves_answer)
        self._max_batch_tokens = config.max_batch_tokens
        self._block_size = config.block_size
        self._leases = leases
        self._prefetcher = prefetcher
        self._estimate = estimate
        self._depth = depth
        self._flights: deque[_Flight] = deque()
        self.steps = 0  # number of the newest step

    @property
    def runs_ahead(self) -> bool:
        """Whether a step of decodes can be scheduled before the tokens of the step in flight are known."""
        going = [each for each in self.queues.running if not each.finish_pending]
        return not self.queues.waiting and all(
            each.can_run_ahead and each.num_scheduled == len(each.tokens) >= each.num_initial_tokens for each in going
        )

    def schedule(self, now_s: float, *, ahead: bool = False) -> StepBuilder | None:
        """The next step; None when there is nothing to compute or copy.

        `ahead`: behind a step in flight, of the tokens that it samples; only if `runs_ahead`. A step with an `error`
        computes nothing; it is in flight only so that its sequences fail when it ends.
        """
        if not self.queues.running and not self.queues.waiting:
            return None
        decodable, unfinished, ordered = self._sorted()
        if ahead:
            decodable, ordered = [each for each in ordered if each.in_flight and not each.ends_next], []
        step = StepBuilder(
            self.queues,
            self.kv,
            self._leases,
            self._prefetcher,
            self._estimate,
            now_s=now_s,
            decodable=tuple(decodable),
            unfinished=tuple(unfinished),
            inflight_decodes=[each for each in ordered if each.num_computed >= each.num_initial_tokens],
            max_decodes=self._max_decodes(len(decodable), len(decodable) + len(ordered)),
            budget=self._max_batch_tokens,
            prompt_share=self._prompt_share(),
            blocks_to_free=sum(len(each.copies.leaving) + len(each.copies.saving) for each in self._flights),
        )
        try:
            self._policy.fill_step(step)
        except Exception as error:
            step.error = error
            if step.current is None:  # no sequence to fail: it would repeat forever
                raise
            step.admitted.append(step.current)
            self._launch(step)
            return step
        if step.is_empty:
            return None
        self.kv.tier.save(step.copies)
        self._launch(step)
        return step

    def _sorted(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Running sequences that decode, that have prompt tokens to schedule, and whose tokens are all in flight."""
        decodable: list[Sequence] = []
        unfinished: list[Sequence] = []
        ordered: list[Sequence] = []
        for each in self.queues.running:
            if each.finish_pending:
                continue
            num_tokens = len(each.tokens)
            num_missing = num_tokens - each.num_computed - each.num_inflight_tokens
            if num_missing == 0:
                ordered.append(each)
            elif 0 < num_missing <= 1 + each.num_forced and num_tokens > each.num_initial_tokens:
                decodable.append(each)
            else:
                unfinished.append(each)
        if self._depth > 1:
            decodable.sort(key=lambda each: each.last_step)
        return decodable, unfinished, ordered

    def _max_decodes(self, num_ready: int, num_decoding: int) -> int:
        """Decodes in the next step: an equal share for each step to be in flight.

        The bound over all decodes keeps groups from merging when others end; the one over ready decodes spreads them
        when nothing is in flight yet.
        """
        num_free = max(1, self._depth - len(self._flights))
        return min(-(-num_decoding // self._depth), -(-num_ready // num_free))

    def _prompt_share(self) -> int:
        """Prompt tokens for the next step, so that other pipeline stages get some too."""
        if self._depth == 1:
            return sys.maxsize
        prompts = [each for each in self.queues.running if each.is_prefilling]
        num_tokens = sum(len(each.tokens) for each in (*prompts, *self.queues.waiting))
        return prompt_share(self._estimate.cost, num_tokens, self._depth)

    def _launch(self, step: StepBuilder) -> None:
        self.steps += 1
        # The kernels want one-token runs first.
        step.slices.sort(key=lambda each: each.count > 1)
        restored = [sequence for sequence, _ in step.copies.restored]
        touched = tuple(dict.fromkeys([*[each.sequence for each in step.slices], *step.admitted, *restored]))
        for sequence in touched:
            sequence.in_flight += 1
            sequence.last_step = self.steps
        self._flights.append(_Flight(touched, step.copies))

    def launch(self, copies: StepCopies) -> None:
        """Put a step without sequences in flight."""
        self.steps += 1
        self._flights.append(_Flight((), copies))

    def commit_copies(self) -> Items[Sequence]:
        """The oldest step in flight has ended, with its copies. Returns its sequences."""
        flight = self._flights.popleft()
        self.kv.commit_copies(flight.copies)
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        return flight.sequences

    @property
    def only_decodes(self) -> Items[Sequence]:
        """The sequences of the step in flight if it computes all that run, none waits, and it copies nothing."""
        if len(self._flights) != 1 or self.queues.waiting:
            return ()
        flight = self._flights[0]
        if len(flight.sequences) != len(self.queues.running) or flight.copies.use_blocks:
            return ()
        return flight.sequences

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def leaving(self) -> Items[Items[int]]:
        """Blocks that no sequence owns any more but that steps in flight still read."""
        return [flight.copies.leaving + flight.copies.saving for flight in self._flights]

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and free its blocks."""
        self.queues.remove(sequence)
        self.kv.release(sequence)

    def check(self) -> None:
        """Prove that what is in flight is what the steps hold. Raises AssertionError."""
        running, waiting = self.queues.running, self.queues.waiting
        touched = Counter(each.key for flight in self._flights for each in flight.sequences)
        assert touched == Counter({each.key: each.in_flight for each in running if each.in_flight}), "flights"
        assert not any(each.in_flight or each.num_inflight_tokens for each in waiting), "a waiting one is in flight"
        for each in running:
            known = len(each.tokens) + (each.in_flight > 1)
            assert each.num_scheduled <= min(known, len(each.blocks) * self._block_size), each.key
            assert each.in_flight or not each.num_inflight_tokens, f"{each.key} is scheduled, but not in flight"
