"""How much better one system is than another, and whether that is more than chance. Pure.

Seeds are paired: both systems saw the same requests at the same moments, so what a seed does to both is no difference
between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cluster.offline.scoring.goodput import half_width


@dataclass(frozen=True, slots=True)
class Difference:
    """`mean` and its 95 % interval by Student's t over the seeds; with one seed the interval is not known, and holds
    everything."""

    mean: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Zero lies outside of the interval."""
        return self.low > 0.0 or self.high < 0.0

    def told(self, unit: str) -> str:
        sure = f"95 % CI {self.low:+.4g}..{self.high:+.4g}" if self.low > -float("inf") else "one seed, no interval"
        return f"{self.mean:+.4g} {unit} ({sure})"


def difference(left: Sequence[float], right: Sequence[float]) -> Difference:
    """Of `right` over `left`, seed by seed. Raises ValueError when they are not as many."""
    pairs = [ours - theirs for theirs, ours in zip(left, right, strict=True)]
    mean = fmean(pairs)
    if len(pairs) < 2:
        return Difference(mean, -float("inf"), float("inf"))
    off = half_width(pairs)
    return Difference(mean, mean - off, mean + off)
