"""The waiting and the running sequences of one engine, and which prompt is next. Knows no block. Pure."""

from collections import deque
from collections.abc import Collection
from itertools import islice

from workers.config import EngineConfig
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence, State
from workers.engine.slo import next_prompt


class Queues:
    """Owned by a Scheduler. Every sequence that waits or runs is in exactly one of the two queues."""

    def __init__(self, config: EngineConfig, estimate: StepEstimate) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._config = config
        self._estimate = estimate
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt."""
        sequence.number = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence got its blocks and runs."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = State.RUNNING

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence lost its blocks; it waits at the front."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.was_preempted = True
        self.preemptions += 1

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)

    @property
    def num_slots(self) -> int:
        """How many more sequences may run."""
        return self._config.max_running - len(self.running)

    def next(self, now_s: float, passed: Collection[Sequence] = ()) -> Sequence | None:
        """The next sequence but the `passed` ones, if a slot is free: preempted ones first, then by configured order.

        A prompt is skipped while its sibling is computing the same tokens, which it will share.
        """
        if self.num_slots <= 0:
            return None
        candidates = (each for each in self.waiting if each not in passed and not self._awaits_sibling(each))
        first = next(candidates, None)
        if first is None or self._config.prompt_order == "fcfs" or first.was_preempted:
            return first
        window = islice(candidates, self._config.prompt_window)
        return next_prompt([first, *window], self._config, self._estimate.prompt_seconds, now_s)

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        group = sequence.request.group
        return bool(group) and any(
            each.request.group == group
            and each.num_computed < len(sequence.tokens) - 1
            and each.tokens == sequence.tokens
            and each.request.cache_salt == sequence.request.cache_salt
            for each in self.running
        )
