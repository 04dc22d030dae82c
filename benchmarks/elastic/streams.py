"""Workloads whose load changes over time, at any density. Pure and seeded.

More load means more requests in the same time, not a faster clock: phases, bursts and days keep their lengths.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.offline.workload.arrivals import MAX_REQUESTS, Arrival, Workload, WorkloadError
from cluster.offline.workload.lengths import Lengths

SPREAD_S = 2.0  # maximum distance of a copied request from its original


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one kind: Poisson, at a rate that changes in steps of (seconds, requests a second)."""

    name: str
    lengths: Lengths
    steps: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.steps or any(not (0.0 < span < math.inf and 0.0 <= rate < math.inf) for span, rate in self.steps):
            raise WorkloadError(f"stream {self.name}: steps are seconds above 0 at rates of 0 or more: {self.steps}")

    @property
    def seconds(self) -> float:
        return sum(span for span, _ in self.steps)

    @property
    def requests(self) -> float:
        """The mean number of requests."""
        return sum(span * rate for span, rate in self.steps)


def superposed(name: str, streams: Sequence[Stream], scale: float, seed: int) -> Workload:
    """All streams at once, each with `scale` times its rates.

    The same seed gives each stream the same lengths in the same order at every scale. Times are the inverse of the
    expected count at unit-rate arrivals (Cinlar, 1975), so a scale only changes the density. Raises `WorkloadError`.
    """
    if not 0.0 < scale < math.inf:
        raise WorkloadError(f"{name}: the scale is {scale}; it must be above 0")
    if scale * sum(stream.requests for stream in streams) > MAX_REQUESTS:
        raise WorkloadError(f"{name}: more than {MAX_REQUESTS:,} requests at {scale:g} times its rates")
    arrivals = [arrival for stream in streams for arrival in _drawn(name, stream, scale, seed)]
    ordered = tuple(sorted(arrivals, key=lambda each: each.at_s))
    return Workload(name, ordered, notes=(f"{scale:.4g} times its rates (seed {seed})",))


def _drawn(name: str, stream: Stream, scale: float, seed: int) -> Iterator[Arrival]:
    lengths = random.Random(f"{name}, {stream.name}, lengths, {seed}")
    gaps = random.Random(f"{name}, {stream.name}, gaps, {seed}")
    begin_s = counted = 0.0
    reached = gaps.expovariate(1.0)
    for span, rate in stream.steps:
        ends = counted + span * rate * scale
        while reached < ends:
            yield Arrival(begin_s + (reached - counted) / (rate * scale), *stream.lengths.draw(lengths))
            reached += gaps.expovariate(1.0)
        begin_s, counted = begin_s + span, ends


def sine(
    seconds: float, mean: float, swing: float, *, at: float = 0.0, steps: int = 60
) -> tuple[tuple[float, float], ...]:
    """One period as steps: a rate of `mean` times 1 +- `swing` (0 to 1), from the phase `at` (0 to 1) on."""
    return tuple(
        (seconds / steps, mean * (1.0 + swing * math.sin(2.0 * math.pi * (at + (step + 0.5) / steps))))
        for step in range(steps)
    )


def denser(workload: Workload, factor: float, seed: int) -> Workload:
    """`factor` times the requests in the same time: each request is copied, a fractional copy is made at random.

    All factors use the same random numbers, so a thinner workload is a subset of a denser one. Copies are up to
    `SPREAD_S` from the original. The n-th copies of all requests share prefixes with each other only, like other users.
    Raises `WorkloadError`.
    """
    if not 0.0 < factor < math.inf or factor * len(workload.arrivals) > MAX_REQUESTS:
        raise WorkloadError(f"{workload.name} cannot be made {factor:g} times as dense")
    source = random.Random(f"{workload.name}, denser, {seed}")
    last_s = workload.arrivals[-1].at_s
    ids = max((max(each.prefix) + 1 for each in workload.arrivals if each.prefix), default=0)
    made: list[Arrival] = []
    for each in workload.arrivals:
        chance, copies = source.random(), random.Random(source.getrandbits(64))
        for number in range(math.floor(factor) + (chance < factor % 1.0)):
            off_s = copies.uniform(-SPREAD_S, SPREAD_S) if number else 0.0
            prefix = tuple(block + number * ids for block in each.prefix)
            made.append(replace(each, at_s=min(max(0.0, each.at_s + off_s), last_s), prefix=prefix))
    made.sort(key=lambda each: each.at_s)
    return workload.with_note(made, f"{factor:.4g} times the requests in the same time (seed {seed})")
