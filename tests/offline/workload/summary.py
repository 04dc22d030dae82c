"""A summary of a workload: rate, burstiness, lengths, and the share of its prompts that a cache could serve. Pure."""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from cluster.offline.workload.arrivals import Workload


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Of prompts or answers, in tokens. Percentiles are interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthSummary":
        ordered = sorted(lengths)
        p50, p90, p99 = (_percentile(ordered, share) for share in (0.50, 0.90, 0.99))
        return cls(fmean(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """`gap_cv`: standard deviation over mean of the gaps between arrivals, 1 for Poisson.

    `busiest_minute`: the most requests in one of the minutes that begin with the first arrival. `reuse`: for each cache
    capacity in prefix blocks (None: unlimited) the share of prompt tokens that it would have held; empty without
    prefixes.
    """

    name: str
    requests: int
    duration_s: float
    rate: float
    gap_cv: float
    busiest_minute: int
    prompt: LengthSummary
    output: LengthSummary
    block_tokens: int
    reuse: tuple[tuple[int | None, float], ...] = ()
    notes: tuple[str, ...] = ()


def summary(workload: Workload, capacities: Sequence[int | None] = (None,)) -> Summary:
    """Of a whole workload; `capacities` are those of `prefix_reuse`."""
    arrivals = workload.arrivals
    gaps = [later.at_s - sooner.at_s for sooner, later in pairwise(arrivals)]
    mean_s = fmean(gaps) if gaps else 0.0
    minutes = Counter(math.floor((each.at_s - arrivals[0].at_s) / 60.0) for each in arrivals)
    shared = any(each.prefix for each in arrivals)
    return Summary(
        workload.name,
        len(arrivals),
        workload.duration_s,
        workload.rate,
        pstdev(gaps) / mean_s if mean_s else 0.0,
        max(minutes.values()),
        LengthSummary.of([each.prompt_tokens for each in arrivals]),
        LengthSummary.of([each.output_tokens for each in arrivals]),
        workload.block_tokens,
        tuple((capacity, prefix_reuse(workload, capacity)) for capacity in capacities) if shared else (),
        workload.notes,
    )


def prefix_reuse(workload: Workload, capacity_blocks: int | None) -> float:
    """Share of prompt tokens that one cache of prefix blocks, least recently used out first, would have held.

    A prompt finds its blocks from the first on, up to the first that is not there; then all of its blocks are the
    newest. No time passes: every prompt is computed before the next comes. None: a cache without limit.
    """
    capacity = math.inf if capacity_blocks is None else capacity_blocks
    cached: OrderedDict[int, None] = OrderedDict()
    found_tokens = 0
    for arrival in workload.arrivals:
        found = next((n for n, block in enumerate(arrival.prefix) if block not in cached), len(arrival.prefix))
        found_tokens += min(found * workload.block_tokens, arrival.prompt_tokens)
        for block in arrival.prefix:
            cached[block] = None
            cached.move_to_end(block)
            if len(cached) > capacity:
                cached.popitem(last=False)
    return found_tokens / sum(each.prompt_tokens for each in workload.arrivals)


def _percentile(ordered: Sequence[int], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
