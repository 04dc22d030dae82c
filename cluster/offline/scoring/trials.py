"""The same load on several configurations, seed by seed: means, how sure they are, and who wins what. Pure.

A mean has a 95 % confidence interval, Student's t over seeds. Two configurations are compared within each seed, since
they got the same requests: seconds and tokens by the geometric mean of the seeds' ratios (t over their logarithms),
shares by the mean of the differences. One is better, or worse, when the interval lies on one side of no difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import exp, inf, log
from statistics import fmean

from cluster.offline.scoring.figures import Figures, Percentiles
from cluster.offline.scoring.goodput import half_width


class TrialVerdict(Enum):
    """Of one configuration against another."""

    BETTER = "better"
    WORSE = "worse"
    EVEN = "not told apart"  # the interval has no difference in it, or there are too few seeds for one


ROUNDING = 1e-9  # of differences and ratios that are none


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run. `factor` and `unit`: as it is shown; shares are 0 to 1."""

    name: str
    value: Callable[[Figures], float | None]
    unit: str
    factor: float = 1.0
    more_is_better: bool = False
    is_share: bool = False


def _of(which: Callable[[Figures], Percentiles | None], name: str) -> Callable[[Figures], float | None]:
    def value(figures: Figures) -> float | None:
        found = which(figures)
        return None if found is None else float(getattr(found, name))

    return value


METRICS = (
    Metric("TTFT and TPOT attainment", lambda each: each.attainment.both, "%", 100.0, True, True),
    Metric("TTFT and worst-TBT attainment", lambda each: each.effective_capacity, "%", 100.0, True, True),
    *(Metric(f"TTFT {name}", _of(lambda each: each.ttft_s, name), "s") for name in ("p50", "p99")),
    *(Metric(f"TPOT {name}", _of(lambda each: each.tpot_s, name), "ms", 1e3) for name in ("p50", "p99")),
    *(Metric(f"TBT {name}", _of(lambda each: each.tbt_s, name), "ms", 1e3) for name in ("p50", "p90", "p99", "max")),
    *(Metric(f"E2E {name}", _of(lambda each: each.e2e_s, name), "s") for name in ("p50", "p99")),
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
    """A mean and its 95 % confidence interval; with one seed the mean itself, which says nothing about sureness."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True, slots=True)
class Against:
    """One configuration against `other`: how many times as much, or for shares how much more."""

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
    """All runs of one comparison. Raises ValueError on two runs of one configuration, load and seed."""

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
        """By seed, where the run has this figure."""
        found = {}
        for seed in self.seeds:
            figures = self._by.get((configuration, load, seed))
            value = None if figures is None else metric.value(figures)
            if value is not None:
                found[seed] = value
        return found

    def mean(self, metric: Metric, configuration: str, load: str) -> Interval | None:
        """Cut where a figure cannot lie: below 0, shares above 1. None: no run has it."""
        samples = self.samples(metric, configuration, load)
        if not samples:
            return None
        found = interval(list(samples.values()))
        return replace(found, low=max(0.0, found.low), high=min(found.high, 1.0 if metric.is_share else inf))

    def best(self, metric: Metric, load: str, among: Sequence[str]) -> str | None:
        """The configuration with the best mean; of equals the first. None: no run of these has this figure."""
        means = {name: found.mean for name in among if (found := self.mean(metric, name, load)) is not None}
        if not means:
            return None
        return (max if metric.more_is_better else min)(means, key=lambda name: means[name])

    def against(self, metric: Metric, configuration: str, other: str, load: str) -> Against | None:
        """Seed by seed. None: there is no seed where both have the figure (for ratios: above 0)."""
        ours, theirs = (self.samples(metric, name, load) for name in (configuration, other))
        pairs = [(value, theirs[seed]) for seed, value in ours.items() if seed in theirs]
        if metric.is_share:
            if not pairs:
                return None
            by = interval([one - two for one, two in pairs])
            return Against(other, by, _verdict(by, 0.0, metric.more_is_better))
        pairs = [(one, two) for one, two in pairs if one > 0.0 and two > 0.0]
        if not pairs:
            return None
        logs = interval([log(one / two) for one, two in pairs])
        by = Interval(exp(logs.mean), exp(logs.low), exp(logs.high), logs.seeds)
        return Against(other, by, _verdict(by, 1.0, metric.more_is_better))

    def against_best(self, metric: Metric, configuration: str, load: str) -> Against | None:
        """Against the colocated configuration that is best at this figure and load."""
        best = self.best(metric, load, [name for name in self.colocated if name != configuration])
        return None if best is None else self.against(metric, configuration, best, load)


def _verdict(by: Interval, even: float, more_is_better: bool) -> TrialVerdict:
    if by.seeds < 2 or by.low - ROUNDING <= even <= by.high + ROUNDING:
        return TrialVerdict.EVEN
    return TrialVerdict.BETTER if (by.mean > even) is more_is_better else TrialVerdict.WORSE
