"""Arrival processes: infinite sequences of arrival times from a seeded source.

Times are seconds from 0 on, in order. `rate` is the long-term mean in requests/s; the same seed gives the same pattern
at every rate, only faster. Sources: gamma gaps with a coefficient of variation as in
AlpaServe (Li et al., 2023); Weibull gaps as in BurstGPT (Wang et al., 2024); a rate that changes over time by thinning
(Lewis and Shedler, 1979).
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat
from typing import Protocol


class Process(Protocol):
    """Arrival times; `times` never ends."""

    def times(self, source: random.Random) -> Iterator[float]: ...


def _summed(gap: Callable[[], float]) -> Iterator[float]:
    at_s = 0.0
    while True:
        yield at_s
        at_s += gap()


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    rate: float

    def times(self, source: random.Random) -> Iterator[float]:
        return _summed(lambda: source.expovariate(self.rate))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps with this coefficient of variation: 1 is Poisson, more is burstier, less is more regular."""

    rate: float
    cv: float = 2.0

    def times(self, source: random.Random) -> Iterator[float]:
        shape = 1.0 / (self.cv * self.cv)
        scale = 1.0 / (self.rate * shape)
        return _summed(lambda: source.gammavariate(shape, scale))


@dataclass(frozen=True, slots=True)
class Weibull:
    """Weibull gaps: shape 1 is Poisson, below 1 is burstier with a heavy tail, above 1 more regular."""

    rate: float
    shape: float = 0.5

    def times(self, source: random.Random) -> Iterator[float]:
        scale = 1.0 / (self.rate * math.gamma(1.0 + 1.0 / self.shape))
        return _summed(lambda: source.weibullvariate(scale, self.shape))


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson for `on_s` seconds, silent for `off_s`, and again. `rate` is the mean over both."""

    rate: float
    on_s: float = 60.0
    off_s: float = 60.0

    def times(self, source: random.Random) -> Iterator[float]:
        cycle_s = self.on_s + self.off_s
        for at_s in Poisson(self.rate * cycle_s / self.on_s).times(source):
            cycles, within_s = divmod(at_s, self.on_s)
            yield cycles * cycle_s + within_s


@dataclass(frozen=True, slots=True)
class Day:
    """The rate swings as a sine over `period_s`, by `swing` (0 to 1) of its mean up and down, rising first."""

    rate: float
    swing: float = 0.5
    period_s: float = 86_400.0

    def times(self, source: random.Random) -> Iterator[float]:
        highest = 1.0 + self.swing
        for at_s in Poisson(self.rate * highest).times(source):
            if source.random() * highest < 1.0 + self.swing * math.sin(2.0 * math.pi * at_s / self.period_s):
                yield at_s


@dataclass(frozen=True, slots=True)
class Constant:
    """Equal gaps."""

    rate: float

    def times(self, source: random.Random) -> Iterator[float]:
        return (number / self.rate for number in count())


@dataclass(frozen=True, slots=True)
class Burst:
    """All at once, at time 0."""

    def times(self, source: random.Random) -> Iterator[float]:
        return repeat(0.0)
