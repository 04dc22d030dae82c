"""A cost model fitted to measured steps: non-negative least squares of relative errors.

    seconds = step + prompt tokens * a + pairs * b + decodes * c + context * d + swapped bytes * e     all 0 or more

Where the steps of few tokens show that the weights are read, with tokens = prompt tokens + decodes:

    seconds = step + max(weights, tokens * a) + pairs * b + decodes * (c - a) + context * d + swapped bytes * e

Where the steps of many tokens show that a token takes longer in them, they add max(0, tokens - large) * f.

Pure: knows shapes and seconds, not how they were measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import numpy as np

from diptych.shapes import Shape
from workers.costs import CostModel, LinearCost, step_seconds

COEFFICIENTS = ("step_s", "prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s")
DIGITS = 5  # of a coefficient; the fit is good for two
NOISE = 0.005  # root mean square, relative; a smaller error shows that noise was fitted


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step. `held_out`: not used by the fit, to measure its error."""

    shape: Shape
    seconds: float
    held_out: bool


@dataclass(frozen=True, slots=True)
class FitError:
    """Absolute relative error of the predictions of this many `points`."""

    points: int
    median: float
    greatest: float


def fit(points: Sequence[Point]) -> LinearCost:
    """The model with the least sum of squared relative errors over the points that are not held out.

    Transfers, and swaps unless a point has some, keep their defaults. Tries every number of tokens as the largest step
    whose weights take longer to read than its tokens to compute; then every one up to half of the largest step as the
    one beyond which a token takes longer.
    """
    seen = [point for point in points if not point.held_out]
    *counts, largest = sorted({point.shape.step_tokens for point in seen})

    def squares(cost: LinearCost) -> float:
        return max(sum(relative_error(cost, point) ** 2 for point in seen), NOISE**2 * len(seen))

    by_most = {most: _fitted(seen, most, 0) for most in (0, *counts)}
    most = min(by_most, key=lambda each: squares(by_most[each]))
    larges = (count for count in counts if most <= count <= largest / 2)
    return min((by_most[most], *(_fitted(seen, most, large) for large in larges)), key=squares)


def _fitted(points: Sequence[Point], most: int, large: int) -> LinearCost:
    """Steps of at most `most` tokens wait for the weights; a token beyond `large` takes longer. 0: none."""
    names = (*COEFFICIENTS, "swap_byte_s") if any(point.shape.swap_bytes for point in points) else COEFFICIENTS
    nothing = replace(LinearCost(), swap_byte_s=0.0, **dict.fromkeys(COEFFICIENTS, 0.0))
    ones = [replace(nothing, **{name: 1.0}) for name in names]
    rows = np.array([[step_seconds(point.shape, one) for one in ones] for point in points])
    tokens = np.array([point.shape.step_tokens for point in points], float)
    if most:
        names = (*names, "weights_s")
        rows[:, names.index("prefill_token_s")] = np.where(tokens > most, tokens, 0.0)
        rows = np.column_stack((rows, tokens <= most))
    if large:
        names = (*names, "large_token_s")
        rows = np.column_stack((rows, np.maximum(0.0, tokens - large)))
    seconds = np.array([point.seconds for point in points])
    found = dict(zip(names, non_negative(rows / seconds[:, None], np.ones(len(points))), strict=True))
    if most:
        found["decode_row_s"] += found["prefill_token_s"]
    rounded = {name: float(f"{value:.{DIGITS - 1}e}") for name, value in found.items()}
    return replace(LinearCost(), large_step_tokens=float(large) if rounded.get("large_token_s") else 0.0, **rounded)


def non_negative(rows: "np.ndarray", wanted: "np.ndarray") -> "np.ndarray":
    """x >= 0 [columns] with the least |rows x - wanted|. Tries all subsets of positive columns, so keep them few."""
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
    """Predicted over measured, minus one."""
    return step_seconds(point.shape, cost) / point.seconds - 1.0


def error_of(cost: CostModel, points: Sequence[Point]) -> FitError:
    """Zero without points."""
    errors = [abs(relative_error(cost, point)) for point in points]
    return FitError(len(errors), median(errors) if errors else 0.0, max(errors, default=0.0))
