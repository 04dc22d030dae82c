"""A curve through measured points that never falls."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise-linear through (xs, ys): both rising, x strictly. Raises ValueError on points that are not.

    Left of the first point it stays at the first value, right of the last it goes on as steeply as between the last
    two. One point is a constant.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        finite = all(math.isfinite(value) and value >= 0.0 for value in (*self.xs, *self.ys))
        rising = all(a < b for a, b in zip(self.xs, self.xs[1:], strict=False))
        level = all(a <= b for a, b in zip(self.ys, self.ys[1:], strict=False))
        if not (self.xs and len(self.xs) == len(self.ys) and finite and rising and level):
            raise ValueError(f"a cost curve needs rising points of 0 or more, not {self.xs} and {self.ys}")

    @classmethod
    def rising(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """Through measured points; one below an earlier one is noise and is lifted to it."""
        sound = sorted(points)
        return cls(tuple(x for x, _ in sound), tuple(accumulate((y for _, y in sound), max)))

    def plus(self, fixed: float, slope: float) -> "Curve":
        """The curve with fixed + slope * x more."""
        return Curve(self.xs, tuple(y + fixed + slope * x for x, y in zip(self.xs, self.ys, strict=True)))

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        right = min(bisect_right(xs, x), len(xs) - 1)
        if right == 0:
            return ys[0]
        left_x, left_y = xs[right - 1], ys[right - 1]
        return left_y + (ys[right] - left_y) * (x - left_x) / (xs[right] - left_x)
