"""The load to plan for, at any rate and with any seed. Pure."""

import random
from dataclasses import dataclass, replace

from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.changes import at_rate, resampled

MOST_KEPT = 4096  # pairs of lengths; more say nothing new about their distribution


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """Requests like those of `source`. With `own_times` runs of its requests at its own gaps, stretched to the rate,
    bursts and shared prefixes kept; a seed is another place in it. Else lengths drawn from it, Poisson arrivals, as
    DistServe's simulator does: a seed is another draw, and one seed's draws are the same at every rate. With
    `one_token` no more than that is wanted of each answer: the prompt is all the work there is.
    """

    source: Workload
    own_times: bool = False
    one_token: bool = False

    @classmethod
    def of(cls, workload: Workload, own_times: bool = False) -> "PlanLoad":
        """Lengths alone are thinned evenly to `MOST_KEPT`."""
        if own_times:
            return cls(workload, True)
        every = -(-len(workload.arrivals) // MOST_KEPT)
        kept = tuple(replace(each, prefix=(), session="") for each in workload.arrivals[::every])
        return cls(replace(workload, arrivals=kept))

    @property
    def has_prefixes(self) -> bool:
        return self.own_times and any(each.prefix for each in self.source.arrivals)

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        arrivals = self.source.arrivals
        return tuple(replace(each, output_tokens=1) for each in arrivals) if self.one_token else arrivals

    def at(self, rate: float, seed: int, count: int) -> Workload:
        """`count` requests, or all that the source has when it has fewer and keeps its own times."""
        workload = self._part(seed, count, rate) if self.own_times else resampled(self.source, count, rate, seed)
        if not self.one_token:
            return workload
        return workload.noted([replace(each, output_tokens=1) for each in workload.arrivals], "one token wanted")

    def _part(self, seed: int, count: int, rate: float) -> Workload:
        arrivals = self.source.arrivals
        last = max(0, len(arrivals) - count)
        begin = random.Random(f"{self.source.name}, part, {seed}").randint(0, last)
        part = arrivals[begin : begin + count]
        moved = [replace(each, at_s=each.at_s - part[0].at_s) for each in part]
        return at_rate(self.source.noted(moved, f"{len(part)} requests from number {begin}"), rate)
