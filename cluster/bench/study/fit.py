"""A cost model fitted to measured steps: non-negative least squares of relative errors.

    seconds = step + prompt tokens * a + pairs * b + decodes * c + context * d          all of them 0 or more

Pure: knows shapes and seconds, not how they were measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from workers.costs import CostModel, LinearCost

COEFFICIENTS = ("step_s", "prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s")
DIGITS = 5  # of a coefficient; the fit is good for two


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: prompt chunks, each (tokens, tokens before them), and `batch` decodes of `context` tokens each."""

    chunks: tuple[tuple[int, int], ...] = ()
    batch: int = 0
    context: int = 0

    @property
    def kind(self) -> str:
        return "mixed" if self.chunks and self.batch else "prompts" if self.chunks else "decodes"

    @property
    def num_tokens(self) -> int:
        """All that stand in the KV after the step."""
        return sum(tokens + cached for tokens, cached in self.chunks) + self.batch * self.context

    def seconds(self, cost: CostModel) -> float:
        return cost.mixed_seconds(self.chunks, self.batch, self.batch * self.context)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step. `held_out`: the fit does not see it, its error says how good the fit is."""

    shape: Shape
    seconds: float
    held_out: bool


def fit(points: Sequence[Point]) -> LinearCost:
    """The model with the least sum of squared relative errors over the points that are not held out.

    What the points say nothing of (transfers, swaps) stays as it is by default.
    """
    seen = [point for point in points if not point.held_out]
    nothing = replace(LinearCost(), **dict.fromkeys(COEFFICIENTS, 0.0))
    ones = [replace(nothing, **{name: 1.0}) for name in COEFFICIENTS]
    rows = np.array([[point.shape.seconds(one) / point.seconds for one in ones] for point in seen])
    found = non_negative(rows, np.ones(len(seen)))
    rounded = [float(f"{value:.{DIGITS - 1}e}") for value in found]
    return replace(LinearCost(), **dict(zip(COEFFICIENTS, rounded, strict=True)))


def non_negative(rows: "np.ndarray", wanted: "np.ndarray") -> "np.ndarray":
    """x >= 0 [columns] with the least |rows x - wanted|. For few columns: it tries which of them are above zero."""
    columns = rows.shape[1]
    best, least = np.zeros(columns), float(wanted @ wanted)
    for number in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), number)):
            part = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)[0]
            rest = rows[:, chosen] @ part - wanted
            if (part >= 0.0).all() and rest @ rest < least:
                least = float(rest @ rest)
                best = np.zeros(columns)
                best[chosen] = part
    return best


def relative_error(cost: CostModel, point: Point) -> float:
    """Predicted over measured, minus one: positive where the model is too slow."""
    return point.shape.seconds(cost) / point.seconds - 1.0
