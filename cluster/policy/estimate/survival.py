"""Survival curves of lengths, from samples of which some are censored. Pure; knows no request.

The estimator is Kaplan and Meier's product limit (JASA 1958). Between knots the curve is linear.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

_FADED = 1e-3  # weight, in units of the newest sample, below which a bin is dropped
_STALE = 0.01  # share of all weight that may be new before the curve is recomputed
_MAX_WEIGHT = 1e9  # of a new sample, before all weights are scaled down


@dataclass(slots=True)
class _Bin:
    """Weights of samples with lengths from `low` to `high`: those that ended, and censored ones."""

    low: int
    high: int
    ended: float = 0.0
    cut: float = 0.0


class Histogram:
    """Fading samples in bins of at most an eighth of an octave; lengths below 16 have a bin each.

    After `memory` newer samples, a sample's weight is 1/e.
    """

    def __init__(self, memory: float = 500.0) -> None:
        self._growth = 1.0 + 1.0 / memory
        self._weight = 1.0  # of the newest sample; it grows instead of all others shrinking
        self._total = self._unseen = 0.0  # weight of all samples, and of those the curve lacks
        self._bins: dict[int, _Bin] = {}
        self._curve: Curve | None = None

    @property
    def num(self) -> float:
        """Total weight, in units of the newest sample."""
        return self._total / self._weight

    def add(self, length: int, cut: bool) -> None:
        """Add a sample of this length (at least 1); `cut`: censored, it would have been longer."""
        self._weight *= self._growth
        self._total += self._weight
        self._unseen += self._weight
        shift = max(0, length.bit_length() - 4)
        found = self._bins.setdefault(length >> shift << shift, _Bin(length, length))
        found.low, found.high = min(found.low, length), max(found.high, length)
        if cut:
            found.cut += self._weight
        else:
            found.ended += self._weight
        if self._weight > _MAX_WEIGHT:
            self._scale_down()

    def _scale_down(self) -> None:
        for key, each in list(self._bins.items()):
            each.ended, each.cut = each.ended / self._weight, each.cut / self._weight
            if each.ended + each.cut < _FADED:
                del self._bins[key]
        self._total = sum(each.ended + each.cut for each in self._bins.values())
        self._weight, self._curve = 1.0, None

    @property
    def curve(self) -> "Curve":
        """The survival curve; the newest one percent of the samples may be missing."""
        if self._curve is None or self._unseen > _STALE * self._total:
            self._curve, self._unseen = self._made(), 0.0
        return self._curve

    def _made(self) -> "Curve":
        bins = [self._bins[key] for key in sorted(self._bins)]
        beyond = list(accumulate((each.ended + each.cut for each in reversed(bins)), initial=0.0))[::-1]
        lengths, shares, share = [0], [1.0], 1.0
        for each, there in zip(bins, beyond, strict=False):
            if each.low - 1 > lengths[-1]:
                lengths.append(each.low - 1)
                shares.append(share)
            share *= max(0.0, 1.0 - each.ended / there)
            lengths.append(each.high)
            shares.append(share)
        ends = [each.high for each in bins]
        return Curve(lengths, shares, ends, [weight / self._weight for weight in beyond])


class Curve:
    """The share of samples longer than a length: 1 at length 0, never increasing, flat after the last knot.

    `beyond[i]` is the weight of samples that reach bin i, which ends at `ends[i]`. All lists ascend in length.
    """

    def __init__(self, lengths: list[int], shares: list[float], ends: list[int], beyond: list[float]) -> None:
        self._lengths = lengths
        self._shares = shares
        self._ends = ends
        self._beyond = beyond
        sums = (_straight_sum(*knots) for knots in zip(lengths, lengths[1:], shares, shares[1:], strict=False))
        self._sums = list(accumulate(sums, initial=0.0))  # of the shares at all lengths before each knot

    def num_longer(self, length: int) -> float:
        """Weight of longer samples, in units of the newest one."""
        return self._beyond[bisect_right(self._ends, length)]

    def share(self, length: int) -> float:
        """The share of samples longer than this."""
        index = bisect_right(self._lengths, length) - 1
        if index + 1 == len(self._lengths):
            return self._shares[index]
        here, there = self._lengths[index], self._lengths[index + 1]
        return self._shares[index] + (self._shares[index + 1] - self._shares[index]) * (length - here) / (there - here)

    def mean(self, seen: int, most: int) -> float:
        """Mean remaining length of what is longer than `seen`, capped at `most`."""
        left = self.share(seen)
        return (self._sum(most) - self._sum(seen)) / left if left > 0.0 else float(most - seen)

    def covered(self, share: float, length: int, most: int) -> float:
        """The part of an outcome within this percentile: 0 or 1, or a fraction where the percentile splits a tie.

        Its mean is `share` if and only if the curve is right (Czado, Gneiting and Held, Biometrics 2009).
        """
        before = 1.0 - self.share(length - 1)
        upto = 1.0 if length >= most else 1.0 - self.share(length)
        if upto - before <= 1e-12:
            return float(share >= upto)
        return min(1.0, max(0.0, (share - before) / (upto - before)))

    def _sum(self, length: int) -> float:
        """Sum of the shares at all lengths below this one."""
        index = bisect_right(self._lengths, length) - 1
        here = self._lengths[index]
        return self._sums[index] + _straight_sum(here, length, self._shares[index], self.share(length))


def _straight_sum(begin: int, end: int, first: float, last: float) -> float:
    """Sum of a linear function over the integers from `begin` to `end` - 1; `last` is its value at `end`."""
    return (end - begin) * (first + last) / 2 + (first - last) / 2
