"""Arrival processes: infinite sequences of arrival times from a seeded source.

Times are seconds from 0 on, in order. `rate` is the long-term mean in requests/s; the same seed gives the same pattern
at every rate, only faster. Sources: gamma gaps with a coefficient of variation as in
AlpaServe (Li et al., 2023); Weibull gaps as in BurstGPT (Wang et al., 2024); a rate that changes over time by thinning
(Lewis and Shedler, 1979).
"""

import math
import random
from collections.abc import Callable, Iterator
from itertools import count, repeat

Process = Callable[[random.Random], Iterator[float]]  # the times never end


def _summed(gap: Callable[[], float]) -> Iterator[float]:
    at_s = 0.0
    while True:
        yield at_s
        at_s += gap()


def poisson(rate: float) -> Process:
    """Independent arrivals: exponential gaps."""
    return lambda source: _summed(lambda: source.expovariate(rate))


def gamma(rate: float, cv: float = 2.0) -> Process:
    """Gamma gaps with this coefficient of variation: 1 is Poisson, more is burstier, less is more regular."""
    shape = 1.0 / (cv * cv)
    return lambda source: _summed(lambda: source.gammavariate(shape, 1.0 / (rate * shape)))


def weibull(rate: float, shape: float = 0.5) -> Process:
    """Weibull gaps: shape 1 is Poisson, below 1 is burstier with a heavy tail, above 1 more regular."""
    scale = 1.0 / (rate * math.gamma(1.0 + 1.0 / shape))
    return lambda source: _summed(lambda: source.weibullvariate(scale, shape))


def on_off(rate: float, on_s: float = 60.0, off_s: float = 60.0) -> Process:
    """Poisson for `on_s` seconds, silent for `off_s`, and again. `rate` is the mean over both."""
    cycle_s = on_s + off_s

    def times(source: random.Random) -> Iterator[float]:
        for at_s in poisson(rate * cycle_s / on_s)(source):
            cycles, within_s = divmod(at_s, on_s)
            yield cycles * cycle_s + within_s

    return times


def day(rate: float, swing: float = 0.5, period_s: float = 86_400.0) -> Process:
    """The rate swings as a sine over `period_s`, by `swing` (0 to 1) of its mean up and down, rising first."""
    highest = 1.0 + swing

    def times(source: random.Random) -> Iterator[float]:
        for at_s in poisson(rate * highest)(source):
            if source.random() * highest < 1.0 + swing * math.sin(2.0 * math.pi * at_s / period_s):
                yield at_s

    return times


def constant(rate: float) -> Process:
    """Equal gaps."""
    return lambda _: (number / rate for number in count())


def burst(_: None = None) -> Process:
    """All at once, at time 0; has no rate."""
    return lambda _: repeat(0.0)
