"""Compares configurations under the same load over several seeds: means, confidence intervals and verdicts. Pure.

Confidence intervals are 95 %, Student's t over seeds. Two configurations are compared within each seed, because they
got the same requests: seconds and tokens by the geometric mean of the seeds' ratios (t over the logarithms), shares by
the mean difference. One is better or worse if the interval excludes "no difference".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import exp, inf, log
from statistics import fmean

from cluster.offline.scoring.figures import Figures, Percentiles
from cluster.offline.scoring.goodput import half_width


class TrialVerdict(Enum):
    """How one configuration compares with another."""

    BETTER = "better"
    WORSE = "worse"
    EVEN = "undecided"  # the interval includes "no difference", or there is only one seed


ROUNDING = 1e-9  # tolerance for equal values


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run. `unit` and `factor` are for display; shares are 0 to 1."""

    name: str
    value: Callable[[Figures], float | None]
    unit: str
    factor: float = 1.0
    more_is_better: bool = False
    is_share: bool = False


def _latency(name: str, field: str, points: Sequence[str], unit: str, factor: float = 1.0) -> Iterator[Metric]:
    """Percentiles of a field of `Figures`."""
    for point in points:
        yield Metric(f"{name} {point}", partial(_point, field, point), unit, factor)


def _point(field: str, point: str, figures: Figures) -> float | None:
    found: Percentiles | None = getattr(figures, field)
    return None if found is None else float(getattr(found, point))


METRICS = (
    Metric("TTFT and TPOT attainment", lambda each: each.attainment.both, "%", 100.0, True, True),
    Metric("TTFT and worst-TBT attainment", lambda each: each.effective_capacity, "%", 100.0, True, True),
    *_latency("TTFT", "ttft_s", ("p50", "p99"), "s"),
    *_latency("TPOT", "tpot_s", ("p50", "p99"), "ms", 1e3),
    *_latency("TBT", "tbt_s", ("p50", "p90", "p99", "max"), "ms", 1e3),
    *_latency("E2E", "e2e_s", ("p50", "p99"), "s"),
    Metric("output tokens", lambda each: each.output_tokens_rate, "tokens/s", more_is_better=True),
)


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One configuration's run of one load with one seed. `is_colocated`: a worker does both phases; None: unknown."""

    configuration: str
    is_colocated: bool | None
    load: str
    seed: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval; with one seed `low` and `high` are the mean (no interval)."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """One configuration against `other`: the ratio of a figure, or the difference of a share."""

    other: str
    by: Interval
    verdict: TrialVerdict


def interval(samples: Sequence[float]) -> Interval:
    """Raises ValueError without samples."""
    if not samples:
        raise ValueError("an interval needs at least one sample")
    mean, off = fmean(samples), half_width(samples)
    return Interval(mean, mean - off, mean + off, len(samples))


class Trials:
    """All runs of one comparison. Raises ValueError if a configuration ran twice under one load and seed."""

    def __init__(self, trials: Sequence[SeedRun]) -> None:
        self.all = tuple(trials)
        self.configurations = tuple(dict.fromkeys(each.configuration for each in trials))
        self.colocated = tuple(dict.fromkeys(each.configuration for each in trials if each.is_colocated))
        self.split = tuple(dict.fromkeys(each.configuration for each in trials if each.is_colocated is False))
        self.loads = tuple(dict.fromkeys(each.load for each in trials))
        self.seeds = tuple(sorted({each.seed for each in trials}))
        self._by = {(each.configuration, each.load, each.seed): each.figures for each in trials}
        if len(self._by) != len(self.all):
            raise ValueError("a configuration ran twice under one load and seed")

    def samples(self, metric: Metric, configuration: str, load: str) -> dict[int, float]:
        """The figure by seed, of runs that have it."""
        runs = ((seed, self._by.get((configuration, load, seed))) for seed in self.seeds)
        values = ((seed, metric.value(figures)) for seed, figures in runs if figures is not None)
        return {seed: value for seed, value in values if value is not None}

    def mean(self, metric: Metric, configuration: str, load: str) -> Interval | None:
        """The mean; its interval is clipped to possible values (shares: 0 to 1). None: no run has the figure."""
        samples = self.samples(metric, configuration, load)
        if not samples:
            return None
        found = interval(list(samples.values()))
        return replace(found, low=max(0.0, found.low), high=min(found.high, 1.0 if metric.is_share else inf))

    def best(self, metric: Metric, load: str, among: Sequence[str]) -> str | None:
        """The configuration with the best mean; the first among equals. None: no run has the figure."""
        means = {name: found.mean for name in among if (found := self.mean(metric, name, load)) is not None}
        if not means:
            return None
        return (max if metric.more_is_better else min)(means, key=lambda name: means[name])

    def against(self, metric: Metric, configuration: str, other: str, load: str) -> PairedDifference | None:
        """Compared seed by seed. None: no seed for which both have the figure (for ratios: above 0)."""
        ours, theirs = (self.samples(metric, name, load) for name in (configuration, other))
        pairs = [(value, theirs[seed]) for seed, value in ours.items() if seed in theirs]
        if metric.is_share:
            if not pairs:
                return None
            by = interval([one - two for one, two in pairs])
            return PairedDifference(other, by, _verdict(by, 0.0, metric.more_is_better))
        pairs = [(one, two) for one, two in pairs if one > 0.0 and two > 0.0]
        if not pairs:
            return None
        logs = interval([log(one / two) for one, two in pairs])
        by = Interval(exp(logs.mean), exp(logs.low), exp(logs.high), logs.seeds)
        return PairedDifference(other, by, _verdict(by, 1.0, metric.more_is_better))

    def against_best(self, metric: Metric, configuration: str, load: str) -> PairedDifference | None:
        """Against the colocated configuration that is best by this figure at this load."""
        best = self.best(metric, load, [name for name in self.colocated if name != configuration])
        return None if best is None else self.against(metric, configuration, best, load)


def _verdict(by: Interval, even: float, more_is_better: bool) -> TrialVerdict:
    if by.seeds < 2 or by.low - ROUNDING <= even <= by.high + ROUNDING:
        return TrialVerdict.EVEN
    return TrialVerdict.BETTER if (by.mean > even) is more_is_better else TrialVerdict.WORSE
