"""Whether the load is still the one that the roles were planned for. Pure; knows no worker.

A shape is what a plan hangs on: lengths, the part of prompts that is computed, rate, burstiness, promises. Lengths of
two shapes are compared by the Jensen-Shannon divergence of their histograms (Lin, 1991) and by their means, rates and
burstiness by the logarithm of their ratio. What chance alone may make of two windows of one load is taken off first:
the divergence of two samples of one distribution is, times 8 ln 2 / (1/n + 1/m), a chi-square variable with as many
degrees of freedom as there are buckets, less one.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from cluster.policy.scaling.evidence import Report, Sample
from workers.request import SLO

MOST_SAMPLES = 2048  # kept of a window; of more, the latest
MOST_REPORTS = 4096
LEAST_SAMPLES = 20  # that make a shape
NEAR = 0.7  # what was far is far until it is nearer than this
PATIENCE = 2.0  # windows: what lasts for one, with how long it is seen
SURE = 2.0  # standard deviations that are put down to chance
_BUCKETS = 25  # one for each power of two of tokens
_FAR_BITS = 0.25
_FAR_RATIO = math.log(1.5)
_FAR_BURSTS = math.log(4.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens. `spread` is their squared coefficient of variation, `shares` those of each power of two."""

    count: int
    mean: float
    spread: float
    p50: float
    p90: float
    shares: tuple[float, ...]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "Sizes":
        """A length between two powers of two counts in both, by its distance: or 511 and 513 would be far apart."""
        if not tokens:
            return cls(0, 0.0, 0.0, 0.0, 0.0, (0.0,) * _BUCKETS)
        shares = [0.0] * _BUCKETS
        for each in tokens:
            place = min(math.log2(max(1, each)), _BUCKETS - 1.001)
            low = int(place)
            shares[low] += (1.0 - (place - low)) / len(tokens)
            shares[low + 1] += (place - low) / len(tokens)
        ordered, mean = sorted(tokens), sum(tokens) / len(tokens)
        middle, high = (float(ordered[min(len(ordered) - 1, int(len(ordered) * at))]) for at in (0.5, 0.9))
        return cls(len(tokens), mean, _spread(tokens, mean), middle, high, tuple(shares))


@dataclass(frozen=True, slots=True)
class Shape:
    """A load. `rate`: requests a second; `burstiness`: the squared coefficient of variation of the gaps between them,
    1 for Poisson. `slo`: what requests were promised, in the middle.
    """

    rate: float
    burstiness: float
    prompt: Sizes
    computed: Sizes
    output: Sizes
    slo: SLO

    def __str__(self) -> str:
        return (
            f"{self.rate:.3g} requests/s of {self.prompt.mean:.0f} ({self.computed.mean:.0f} computed) + "
            f"{self.output.mean:.0f} tokens"
        )


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two shapes are apart in each respect: 0 is no more than chance may do, 1 is far."""

    prompt: float
    computed: float
    output: float
    rate: float
    burstiness: float
    promise: float

    @property
    def most(self) -> float:
        return max(self.prompt, self.computed, self.output, self.rate, self.burstiness, self.promise)

    def __str__(self) -> str:
        far = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{name} {value:.1f}" for name, value in far if value >= NEAR)


def shape_of(samples: Sequence[Sample], ages_s: Iterable[float], rate: float, default: SLO) -> Shape:
    """`ages_s`: since each of the samples arrived. Requests that were turned away have a prompt and no more.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there is no shape of no requests")
    served = [sample for sample in samples if not sample.refused]
    arrived = sorted(-age_s for age_s in ages_s)
    gaps = [later - sooner for sooner, later in pairwise(arrived)]
    mean_s = sum(gaps) / len(gaps) if gaps else 0.0
    return Shape(
        rate=rate,
        burstiness=_spread(gaps, mean_s) if mean_s else 1.0,
        prompt=Sizes.of([sample.prompt_tokens for sample in samples]),
        computed=Sizes.of([sample.computed_tokens for sample in served]),
        output=Sizes.of([sample.output_tokens for sample in served]),
        slo=SLO(
            _middle([sample.promised_ttft_s for sample in samples], default.ttft_s),
            _middle([sample.promised_tpot_s for sample in samples], default.tpot_s),
        ),
    )


def distance(one: Shape, other: Shape) -> Distance:
    """Symmetric."""
    counts = one.prompt.count, other.prompt.count
    rate = _apart(
        one.rate, other.rate, one.burstiness / max(1, counts[0]) + other.burstiness / max(1, counts[1]), _FAR_RATIO
    )
    least = 1.0 / min(counts) if min(counts) else 1.0  # a burstiness of 0 has no logarithm
    bursts = _apart(
        max(one.burstiness, least),
        max(other.burstiness, least),
        sum(4.0 / max(1, count) for count in counts),
        _FAR_BURSTS,
    )
    promises = ((one.slo.ttft_s, other.slo.ttft_s), (one.slo.tpot_s, other.slo.tpot_s))
    return Distance(
        prompt=_lengths_apart(one.prompt, other.prompt),
        computed=_lengths_apart(one.computed, other.computed),
        output=_lengths_apart(one.output, other.output),
        rate=rate,
        burstiness=bursts,
        promise=max(_promises_apart(*each) for each in promises),
    )


def divergence(one: Sequence[float], other: Sequence[float]) -> float:
    """Jensen and Shannon's, of two distributions over the same buckets: 0 to 1 bit."""
    total = 0.0
    for p, q in zip(one, other, strict=True):
        middle = (p + q) / 2.0
        total += sum(share * math.log2(share / middle) for share in (p, q) if share > 0.0) / 2.0
    return min(1.0, max(0.0, total))


def _lengths_apart(one: Sizes, other: Sizes) -> float:
    if not one.count or not other.count:
        return 0.0
    per_sample = 1.0 / one.count + 1.0 / other.count
    buckets = sum(p > 0.0 or q > 0.0 for p, q in zip(one.shares, other.shares, strict=True)) - 1
    by_chance = per_sample / (8.0 * math.log(2.0)) * (buckets + SURE * math.sqrt(2.0 * buckets))
    means = _apart(one.mean, other.mean, one.spread / one.count + other.spread / other.count, _FAR_RATIO)
    return max(means, (divergence(one.shares, other.shares) - by_chance) / _FAR_BITS, 0.0)


def _apart(one: float, other: float, variance: float, far: float) -> float:
    """The logarithm of the ratio of two estimates. `variance`: of both together, relative to them."""
    if one <= 0.0 or other <= 0.0:
        return 0.0 if one == other else math.inf
    return max(0.0, abs(math.log(one / other)) - SURE * math.sqrt(variance)) / far


def _promises_apart(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return _apart(one, other, 0.0, _FAR_RATIO)


def _spread(values: Sequence[float], mean: float) -> float:
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2 if mean else 0.0


def _middle(promises: Sequence[float | None], default: float | None) -> float | None:
    known = sorted(each for each in promises if each is not None)
    return known[len(known) // 2] if known else default


@dataclass(frozen=True, slots=True)
class Moved:
    """The load that was planned for, and the one there is."""

    before: Shape
    after: Shape
    distance: Distance

    def __str__(self) -> str:
        return f"{self.before} became {self.after} (far in {self.distance})"


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that has ended. `arrived_s` is on the clock of who was told."""

    arrived_s: float
    told_s: float
    sample: Sample


class Drift:
    """Says when the shape of the last `window_s` has been far from the planned one for `PATIENCE` windows: a burst of
    one is over by then, and the window holds the new load only. Not within `rest_s` of the last time. The first shape
    that is known is taken as the planned one.

    Told of every report; keeps what `MOST_SAMPLES` and `MOST_REPORTS` allow.
    """

    def __init__(self, window_s: float, rest_s: float, default: SLO) -> None:
        self._window_s = window_s
        self._rest_s = rest_s
        self._default = default
        self._seen: deque[Seen] = deque(maxlen=MOST_SAMPLES)
        self._reports: deque[tuple[float, float, int]] = deque(maxlen=MOST_REPORTS)  # from, to, how many arrived
        self._begun_s: float | None = None
        self._planned: Shape | None = None
        self._tried_s: float | None = None
        self._far_since_s: float | None = None

    def told(self, report: Report, now_s: float) -> None:
        if self._begun_s is None:
            self._begun_s = now_s
        self._reports.append((now_s - report.seconds, now_s, report.arrived))
        self._seen.extend(Seen(now_s - sample.age_s, now_s, sample) for sample in report.samples)

    def moved(self, now_s: float) -> Moved | None:
        """Asked every period. What it says it goes on saying until `planned` or `tried`."""
        shape = self.shape(now_s)
        if shape is None:
            self._far_since_s = None
            return None
        if self._planned is None:
            self._planned = shape
        found = distance(self._planned, shape)
        if found.most < NEAR:
            self._far_since_s = None
        elif found.most >= 1.0 and self._far_since_s is None:
            self._far_since_s = now_s
        lasts = self._far_since_s is not None and now_s - self._far_since_s >= PATIENCE * self._window_s
        if not lasts or found.most < 1.0:
            return None
        rested = self._tried_s is None or now_s - self._tried_s >= self._rest_s
        return Moved(self._planned, shape, found) if rested else None

    def planned(self, shape: Shape, now_s: float) -> None:
        """Roles are right for this shape now."""
        self._planned, self._far_since_s = shape, None
        self.tried(now_s)

    def tried(self, now_s: float) -> None:
        """There is no plan; the next try comes after `rest_s`."""
        self._tried_s = now_s

    def shape(self, now_s: float) -> Shape | None:
        """Of the window; None while too little is known: what ends first has short answers, so the first window is not
        looked at.
        """
        self._forget(now_s)
        if self._begun_s is None or now_s - self._begun_s < 2.0 * self._window_s or len(self._seen) < LEAST_SAMPLES:
            return None
        span_s = max(now_s - min(since_s for since_s, _, _ in self._reports), 1e-9)
        rate = sum(arrived for _, _, arrived in self._reports) / span_s
        samples = [each.sample for each in self._seen]
        return shape_of(samples, [now_s - each.arrived_s for each in self._seen], rate, self._default)

    def recent(self) -> list[Seen]:
        """What the shape is made of, in the order of arrival."""
        return sorted(self._seen, key=lambda each: each.arrived_s)

    def _forget(self, now_s: float) -> None:
        while self._seen and self._seen[0].told_s <= now_s - self._window_s:
            self._seen.popleft()
        while self._reports and self._reports[0][1] <= now_s - self._window_s:
            self._reports.popleft()
