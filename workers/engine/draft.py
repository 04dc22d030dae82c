"""One step in the making: what a batching policy chose so far, and what must be copied for it.

Knows the sequences of the step; queues, slots and blocks are whose it is made by.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from workers.costs import CostModel
from workers.engine.estimate import StepEstimate
from workers.engine.host_tier import HostMoves
from workers.engine.sequence import Sequence, State


@dataclass(slots=True)
class Slice:
    """`count` tokens of a sequence, from position `first` on."""

    sequence: Sequence
    first: int
    count: int


class Mechanics(Protocol):
    """What a draft asks of the `Scheduler` that makes it; see there."""

    waiting: deque[Sequence]

    def make_writable(self, sequence: Sequence, draft: "StepDraft") -> bool: ...
    def room(self, sequence: Sequence) -> int: ...
    def admit(self, draft: "StepDraft", most: int | None) -> Sequence | None: ...


class StepDraft:
    """One step in the making: `batching.Step` to the policy, and its outcome to the engine."""

    def __init__(
        self,
        scheduler: Mechanics,
        *,
        now_s: float,
        decodable: tuple[Sequence, ...],
        unfinished: tuple[Sequence, ...],
        beside: list[Sequence],
        rows: int,
        budget: int,
        share: int,
        estimate: StepEstimate,
    ) -> None:
        self.now_s = now_s
        self.decodable = decodable
        self.unfinished = unfinished
        self.beside = beside
        self.left = budget
        self.share = share
        self.slices: list[Slice] = []
        self.chosen: set[Sequence] = set()
        self.stopped: set[Sequence] = set()  # in flight, to be preempted when they no longer are
        self.admitted: list[Sequence] = []
        self.moves = HostMoves()
        self.swap_out, self.swap_in = self.moves.swap_out, self.moves.swap_in
        self.copies: list[tuple[int, int]] = []
        self.leaving: list[int] = []  # blocks to free when this step has ended
        self.at_hand: Sequence | None = None  # the one that something is done for now
        self.error: Exception | None = None  # that ended the making of it
        self.coming = 0  # blocks that come free with steps under way, and that nobody waits for yet
        self._rows = rows
        self._scheduler = scheduler
        self._estimate = estimate

    @property
    def has_waiting(self) -> bool:
        return bool(self._scheduler.waiting)

    @property
    def cost(self) -> CostModel:
        return self._estimate.cost

    def decode(self, sequence: Sequence) -> bool:
        if self._rows <= 0:
            self.beside.append(sequence)
            return False
        if self.left <= 0 or not self._take(sequence, 1):
            return False
        self._rows -= 1
        return True

    def chunk(self, sequence: Sequence, most: int | None = None) -> int:
        missing = len(sequence.tokens) - sequence.num_scheduled
        count = self._take(sequence, missing if most is None else min(missing, most))
        self.share -= count
        return count

    def _take(self, sequence: Sequence, count: int) -> int:
        if count <= 0 or sequence.state is not State.RUNNING or sequence in self.stopped:
            return 0
        self.at_hand = sequence
        if not self._scheduler.make_writable(sequence, self):
            return 0
        count = min(count, self._scheduler.room(sequence))
        self.chosen.add(sequence)
        self.slices.append(Slice(sequence, sequence.num_scheduled, count))
        sequence.num_ordered += count
        self.left -= count
        return count

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy blocks in this step, and let go of the sources when it has ended."""
        self.copies += zip(sources, targets, strict=True)
        self.leaving += sources

    def admit(self, most: int | None = None) -> Sequence | None:
        sequence = self._scheduler.admit(self, most)
        if sequence is not None:
            self.admitted.append(sequence)
        return sequence
