"""A step under construction: what the batching policy has chosen so far, with the blocks and copies it takes.

Without free blocks, the youngest sequence is preempted completely. It returns to the front of the queue, so the oldest
always makes progress. Sequences in flight and prompts held for a reader are not preempted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.costs import CostModel
from workers.engine.estimate import StepEstimate
from workers.engine.host_tier import StepCopies
from workers.engine.kv_cache import KVCacheManager
from workers.engine.leases import LeaseManager
from workers.engine.prefetch import Prefetcher
from workers.engine.queues import Queues
from workers.engine.race import StepSeconds
from workers.engine.sequence import Sequence, State
from workers.engine.step import Chunk, StepPlan

MAX_PASSED = 8  # waiting prompts that one step may pass over


@dataclass(slots=True)
class Slice:
    """`count` tokens of a sequence, from position `first` on."""

    sequence: Sequence
    first: int
    count: int


class StepBuilder:
    """A `batching.Step` for the policy, and its result for the Scheduler.

    `max_decodes`: most decodes in the step. `blocks_to_free`: blocks that come free with steps in flight.
    """

    def __init__(
        self,
        queues: Queues,
        kv: KVCacheManager,
        leases: LeaseManager,
        prefetcher: Prefetcher,
        estimate: StepEstimate,
        *,
        now_s: float,
        decodable: tuple[Sequence, ...],
        unfinished: tuple[Sequence, ...],
        inflight_decodes: list[Sequence],
        max_decodes: int,
        budget: int,
        prompt_share: int,
        blocks_to_free: int,
    ) -> None:
        self.now_s = now_s
        self.decodable = decodable
        self.unfinished = unfinished
        self.inflight_decodes = inflight_decodes
        self.budget_left = budget
        self.prompt_share = prompt_share
        self.slices: list[Slice] = []
        self.admitted: list[Sequence] = []
        self.copies = StepCopies()
        self.current: Sequence | None = None  # the sequence being worked on
        self.error: Exception | None = None  # that ended the construction
        self._queues = queues
        self._kv = kv
        self._leases = leases
        self._prefetcher = prefetcher
        self._budget = budget
        self._estimate = estimate
        self._max_decodes = max_decodes
        self._blocks_to_free = blocks_to_free
        self._passed: list[Sequence] = []  # not admitted in this step; later ones may be
        self._reading: dict[Sequence, float] = {}  # those of them that wait for reads -> until when
        self._chosen: set[Sequence] = set()
        self._stopped: set[Sequence] = set()  # in flight; preempted once they are not

    @property
    def has_waiting(self) -> bool:
        return bool(self._queues.waiting)

    @property
    def cost(self) -> CostModel:
        return self._estimate.cost

    @property
    def is_empty(self) -> bool:
        return not (self.slices or self.copies.restored or self.admitted)

    def plan(
        self,
        number: int,
        end_tokens: tuple[int, ...],
        most_digests: int,
        failed: Callable[[Sequence, Exception], None],
    ) -> StepPlan:
        """What the executor gets. A sequence whose chunk cannot be made has `failed`."""
        chunks: list[Chunk] = []
        digests: list[tuple[int, int]] = []
        for each in self.slices:
            try:
                chunks.append(each.sequence.chunk(each.first, each.count, self._kv.block_size, end_tokens, self.now_s))
            except Exception as error:
                failed(each.sequence, error)
                continue
            if len(self._leases):
                digests += self._leases.undigested(each.sequence.key, each.first + each.count)
        return self.copies.plan(number, chunks, digests + self._leases.offered(number, most_digests, self.copies))

    def decode(self, sequence: Sequence) -> bool:
        if self._max_decodes <= 0:
            self.inflight_decodes.append(sequence)
            return False
        newest = max(1, len(sequence.tokens) - sequence.num_scheduled)  # one: that of the step in flight
        if self.budget_left <= 0 or not self._take(sequence, min(newest, self.budget_left)):
            return False
        self._max_decodes -= 1
        return True

    def chunk(self, sequence: Sequence, most: int | None = None) -> int:
        if self._may_take(sequence) and self._prefetcher.has(sequence):
            self._kv.restore(sequence, self.copies)
        missing = len(sequence.tokens) - sequence.num_scheduled
        if self._prefetcher:
            missing = min(missing, self._prefetcher.tokens_now(sequence, self._times()))
        count = self._take(sequence, missing if most is None else min(missing, most))
        self.prompt_share -= count
        return count

    def _times(self) -> StepSeconds:
        """Predicted step times, given what this step computes already."""
        prompts = [(each.count, each.first) for each in self.slices if each.count > 1]
        decodes = [each.first + 1 for each in self.slices if each.count == 1]
        return StepSeconds(self.cost, prompts, len(decodes), sum(decodes), self._budget)

    def _may_take(self, sequence: Sequence) -> bool:
        return sequence.state is State.RUNNING and sequence not in self._stopped

    def _take(self, sequence: Sequence, count: int) -> int:
        if count <= 0 or not self._may_take(sequence):
            return 0
        self.current = sequence
        if not self._kv.is_writable(sequence):
            if not self._make_room(sequence):
                return 0
            self._kv.make_writable(sequence, self.copies)
        count = min(count, self._kv.room(sequence))
        self._chosen.add(sequence)
        self.slices.append(Slice(sequence, sequence.num_scheduled, count))
        sequence.num_inflight_tokens += count
        self.budget_left -= count
        return count

    def admit(self, fits: Callable[[int], bool] | None = None) -> Sequence | None:
        while len(self._passed) < MAX_PASSED:
            sequence = self._queues.next(self.now_s, self._passed)
            if sequence is None or (fits is not None and not fits(len(sequence.tokens) - sequence.num_computed)):
                return None
            self.current = sequence
            until_s = self._prefetcher.waits_until_s(sequence, self._times()) if self._prefetcher else None
            if until_s is None and (not self._reading or self._may_pass(sequence)):
                if not self._kv.place(sequence, self.copies):
                    return None
                self._queues.start(sequence)
                self.admitted.append(sequence)
                return sequence
            self._passed.append(sequence)
            if until_s is not None:
                self._reading[sequence] = until_s
        return None

    def _may_pass(self, sequence: Sequence) -> bool:
        """Whether this prompt can be computed before the passed prompts stop waiting for reads.

        It must leave them slots and blocks.
        """
        if self._queues.num_slots <= len(self._reading) or not self._kv.leaves(sequence, tuple(self._reading)):
            return False
        first = self._kv.num_ready(sequence)
        return self.now_s + self._times().now(len(sequence.tokens) - first, first) <= min(self._reading.values())

    def _make_room(self, sequence: Sequence) -> bool:
        """Get a free block: withdraw what was restored for readers, then preempt younger sequences, or else this one.

        False: not in this step.
        """
        while not self._kv.has_free_block:
            if self._leases.withdraw_restored():
                continue
            if self._blocks_to_free > 0:  # wait for a block that comes free when a step ends
                self._blocks_to_free -= 1
                return False
            if self._kv.borrowed.is_moving:  # as for the end of a step
                return False
            victim = self._victim()
            if victim is None:
                return False
            if victim.in_flight:  # wait for its steps to end rather than preempt an older one
                self._stopped.add(victim)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence | None:
        """The youngest sequence outside this step. Held prompts stay, because a reader may be fetching them."""
        restored = [sequence for sequence, _ in self.copies.restored]
        others = [
            each
            for each in self._queues.running
            if not (each.hold or each in self._chosen or each in self.admitted or each in restored)
        ]
        return max(others, key=lambda each: (each.arrival_s, each.number), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        self._leases.drop(sequence.key)  # of a migration: the reader is refused, and the sequence stays here
        self._kv.preempt(sequence)
        self._queues.preempt(sequence)
