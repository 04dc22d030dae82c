"""The bubble of a pipeline: the share of its stages' time that they idle while a plan is in flight.

Pure: seconds are arguments; it reads no clock.

Source of the name and the measure: Huang et al., GPipe (NeurIPS'19).
"""

from collections import deque
from collections.abc import Iterable

WINDOW = 256  # plans: follows the load, but smooths the fill and drain of a prompt


class BubbleMeter:
    """Owned by an executor of `stages` stages. Plans are added in the order in which they end."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._plans: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (seconds covered, busy seconds of all stages)
        self._covered_to_s = float("-inf")

    def add(self, begin_s: float, end_s: float, busy_s: Iterable[float]) -> None:
        """A plan was in flight from `begin_s` to `end_s`; `busy_s` has each stage's busy seconds."""
        if self._stages == 1:
            return
        covered_s = max(0.0, end_s - max(begin_s, self._covered_to_s))
        self._covered_to_s = max(self._covered_to_s, end_s)
        self._plans.append((covered_s, sum(busy_s)))

    @property
    def share(self) -> float:
        """1 - busy stage seconds / (stages * seconds with a plan in flight), 0 to 1; 0.0 for one stage, or no plan."""
        if not self._plans:
            return 0.0
        covered_s, busy_s = map(sum, zip(*self._plans, strict=True))
        if covered_s <= 0.0:
            return 0.0
        return min(max(0.0, 1.0 - busy_s / (self._stages * covered_s)), 1.0)
