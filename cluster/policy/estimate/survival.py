"""How likely something goes on beyond a length, from lengths seen of which some were cut. Pure; knows no request.

Kaplan and Meier's product limit (JASA 1958): of those still there at a length, the share that did not end at it. What
was cut counts among those still there, up to where it was cut. Between knots the curve is straight.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

_FADED = 1e-3  # weight, in newest observations, of a bin that is dropped
_STALE = 0.01  # of all weight, that may come before a curve is made again
_MOST_WEIGHT = 1e9  # of a new observation, before all weights are scaled down


@dataclass(slots=True)
class _Bin:
    """Weights of what ended and what was cut at lengths from `low` to `high`."""

    low: int
    high: int
    ended: float = 0.0
    cut: float = 0.0


class Histogram:
    """Lengths, each bin an eighth of an octave at most; lengths below 16 have their own. Old ones fade.

    After `memory` more observations an older one counts 1/e.
    """

    def __init__(self, memory: float = 500.0) -> None:
        self._growth = 1.0 + 1.0 / memory
        self._weight = 1.0  # of the newest observation: it grows, so that the others need not be touched
        self._total = self._unseen = 0.0  # of all, and of those that the curve does not have
        self._bins: dict[int, _Bin] = {}
        self._curve: Curve | None = None

    @property
    def num(self) -> float:
        """How many observations there are, in newest ones."""
        return self._total / self._weight

    def add(self, length: int, cut: bool) -> None:
        """Something ended at this length, 1 or more; or it was cut there, and would have been longer."""
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
        if self._weight > _MOST_WEIGHT:
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
        """What the observations say; the newest one in a hundred may be missing."""
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
    """The share that is longer than a length: 1 at length 0, never rising, flat behind the last knot.

    `ends` and `beyond` tell how many observations are not over before a bin ends. All lists are ascending in length.
    """

    def __init__(self, lengths: list[int], shares: list[float], ends: list[int], beyond: list[float]) -> None:
        self._lengths = lengths
        self._shares = shares
        self._ends = ends
        self._beyond = beyond
        sums = (_straight_sum(*knots) for knots in zip(lengths, lengths[1:], shares, shares[1:], strict=False))
        self._sums = list(accumulate(sums, initial=0.0))  # of the shares at all lengths before each knot

    def num_beyond(self, length: int) -> float:
        """How many observations, in newest ones, got longer."""
        return self._beyond[bisect_right(self._ends, length)]

    def share(self, length: int) -> float:
        """Of all, those longer than this."""
        index = bisect_right(self._lengths, length) - 1
        if index + 1 == len(self._lengths):
            return self._shares[index]
        here, there = self._lengths[index], self._lengths[index + 1]
        return self._shares[index] + (self._shares[index + 1] - self._shares[index]) * (length - here) / (there - here)

    def mean(self, seen: int, most: int) -> float:
        """How much is still to come, on average, of what is longer than `seen` and is cut at `most`."""
        left = self.share(seen)
        return (self._sum(most) - self._sum(seen)) / left if left > 0.0 else float(most - seen)

    def within(self, share: float, seen: int, most: int) -> int:
        """The least length at which this share of what is longer than `seen` has ended; at most `most`."""
        wanted = (1.0 - share) * self.share(seen)
        index = bisect_left(self._shares, -wanted, key=lambda each: -each)
        if index == len(self._shares) or index == 0:
            return most
        before, after = self._shares[index - 1], self._shares[index]
        begin, end = self._lengths[index - 1], self._lengths[index]
        length = math.ceil(begin + (before - wanted) / (before - after) * (end - begin) - 1e-9)
        return min(max(length, seen + 1), most)

    def covered(self, share: float, length: int, most: int) -> float:
        """The part of an outcome that lies within this percentile: 0 or 1, unless many outcomes are alike.

        Where the percentile falls among equal outcomes, so much of them as it covers. The mean is `share` if and only
        if the curve is right (Czado, Gneiting and Held, Biometrics 2009).
        """
        before = 1.0 - self.share(length - 1)
        upto = 1.0 if length >= most else 1.0 - self.share(length)
        if upto - before <= 1e-12:
            return float(share >= upto)
        return min(1.0, max(0.0, (share - before) / (upto - before)))

    def likeliest(self, seen: int, most: int, width: int) -> int:
        """Which bucket of `width` the rest falls into, most likely: 0 for 1 to `width` more, and so on."""
        last = (most - seen - 1) // width
        buckets = {0, last}
        for length in self._lengths:
            if seen <= length < most:
                buckets |= {(length - seen) // width, max(0, length - seen - 1) // width}

        def mass(bucket: int) -> float:
            end = seen + (bucket + 1) * width
            return self.share(seen + bucket * width) - (self.share(end) if end < most else 0.0)

        return max(sorted(buckets), key=mass)

    def _sum(self, length: int) -> float:
        """Of the shares at all lengths from 0 to before this one."""
        index = bisect_right(self._lengths, length) - 1
        here = self._lengths[index]
        return self._sums[index] + _straight_sum(here, length, self._shares[index], self.share(length))


def _straight_sum(begin: int, end: int, first: float, last: float) -> float:
    """Of values on a straight line, at all integers from `begin` to before `end`; `last` is the value at `end`."""
    return (end - begin) * (first + last) / 2 + (first - last) / 2
