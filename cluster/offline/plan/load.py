"""The load to plan for, at any rate and with any seed; a warning if it is longer than the model's context. Pure."""

import random
from dataclasses import dataclass, replace

from cluster.offline.workload.arrivals import Arrival, Workload, WorkloadError
from cluster.offline.workload.changes import at_rate, resampled
from workers.profiles.shapes import shape_of

MAX_LENGTHS = 4096  # pairs of lengths; more add nothing to what is known of their distribution


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """Requests like those of `source`.

    By default lengths are drawn from it and arrivals are Poisson, as in DistServe's simulator; one seed draws the same
    requests at every rate. With `own_times`, a run is a part of the source with its own gaps, stretched to the rate,
    so bursts and shared prefixes stay; the seed chooses the part. With `one_token`, every answer has one token, so the
    prompt is all the work.
    """

    source: Workload
    own_times: bool = False
    one_token: bool = False

    @classmethod
    def of(cls, workload: Workload, own_times: bool = False) -> "PlanLoad":
        """Where only lengths matter, they are thinned evenly to `MAX_LENGTHS`.

        Raises `WorkloadError` if own times are wanted where all requests arrive at once.
        """
        if own_times:
            if not workload.rate:
                raise WorkloadError(
                    f"{workload.name}: {len(workload.arrivals)} request(s), all at one time, have no rate to scale; "
                    "give more requests, or leave --own-times out"
                )
            return cls(workload, True)
        every = -(-len(workload.arrivals) // MAX_LENGTHS)
        lengths = tuple(replace(each, prefix=(), session="") for each in workload.arrivals[::every])
        return cls(replace(workload, arrivals=lengths))

    @property
    def has_prefixes(self) -> bool:
        return self.own_times and any(each.prefix for each in self.source.arrivals)

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        arrivals = self.source.arrivals
        return tuple(replace(each, output_tokens=1) for each in arrivals) if self.one_token else arrivals

    def at(self, rate: float, seed: int, count: int) -> Workload:
        """`count` requests; with `own_times` at most as many as the source has."""
        workload = self._part(seed, count, rate) if self.own_times else resampled(self.source, count, rate, seed)
        if not self.one_token:
            return workload
        return workload.with_note([replace(each, output_tokens=1) for each in workload.arrivals], "one token wanted")

    def _part(self, seed: int, count: int, rate: float) -> Workload:
        arrivals = self.source.arrivals
        begin = random.Random(f"{self.source.name}, part, {seed}").randint(0, max(0, len(arrivals) - count))
        part = arrivals[begin : begin + count]
        moved = [replace(each, at_s=each.at_s - part[0].at_s) for each in part]
        return at_rate(self.source.with_note(moved, f"{len(part)} requests from number {begin}"), rate)


def too_long(model: str, load: PlanLoad) -> list[str]:
    """A warning if requests are longer than the context."""
    context = shape_of(model).context_length
    lengths = [each.prompt_tokens + each.output_tokens for each in load.source.arrivals]
    share = sum(length > context for length in lengths) / len(lengths) if context else 0.0
    if not share:
        return []
    return [
        f"Warning: {share:.1%} of the requests are longer than the context of {model} ({context:,} tokens). A server "
        "refuses them; this plan serves them, as if the model took them"
    ]
