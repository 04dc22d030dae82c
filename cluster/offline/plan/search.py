"""The best of many candidates without measuring each: the others need only be shown to be worse. Pure.

A candidate's value is its goodput per unit of weight. The most promising is measured first. Each further one is tried
once, at the rate it needs to be better, and measured only if it meets the SLO there. Candidates that miss the SLO on an
idle machine are not tried, nor are rates above `max_rate`: a run of a few hundred requests ends before a queue shows.
If attainment falls with the rate, the result is that of measuring all candidates, to the tolerance.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from math import inf

from cluster.offline.plan.trial import FLOOR, MARGIN, Trial
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, TimeUp, goodput

WAVE = 4  # candidates tried at once; fixed, so that the result does not depend on the number of processes
SLACK = 1.1  # `max_rate` is for the mean request; a goodput above it by more than this comes from too short a run


class SearchOutcome(Enum):
    MEASURED = "measured"
    BEATEN = "worse than what is known"
    HOPELESS = "missing the SLO even without load"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Found:
    """`goodput`: if measured. `requests`: simulated for it. A rate above `enough` adds no value."""

    candidate: Trial
    outcome: SearchOutcome
    goodput: Goodput | None = None
    requests: int = 0
    enough: float = inf

    @property
    def rate(self) -> float:
        return self.goodput.rate if self.goodput else 0.0

    @property
    def value(self) -> float:
        return min(self.rate, self.enough) / self.candidate.weight


@dataclass(frozen=True, slots=True)
class Effort:
    """Search at this target, with one seed, to this relative tolerance, until `max_requests` have been simulated.

    No rate above `enough` is tried.
    """

    target: float
    seed: int = 0
    tolerance: float = 0.05
    max_requests: int = 1_000_000
    enough: float = inf


@dataclass(slots=True)
class Ranking:
    """All candidates, the most valuable first. `timed_out`: the time was up before all were tried; `ended`: the time of
    the whole search."""

    found: list[Found] = field(default_factory=list)
    timed_out: bool = False
    ended: bool = False

    @property
    def best(self) -> list[Found]:
        """Those with a goodput above zero."""
        return [each for each in self.found if each.rate > 0.0]

    @property
    def requests(self) -> int:
        return sum(each.requests for each in self.found)

    def value_to_beat(self, keep: int) -> float:
        """What one more must exceed to be among the `keep` best; 0: anything."""
        values = sorted((each.value for each in self.found), reverse=True)
        return values[keep - 1] if len(values) >= keep else 0.0


def best_of(
    candidates: Sequence[Trial],
    effort: Effort,
    each: Map = map,
    *,
    keep: int = 1,
    on_progress: Callable[[int, Found | None], None] = lambda done, best: None,
    time_up: Callable[[], bool] = lambda: False,
) -> Ranking:
    """Find the `keep` best. `each` may be an executor's `map`. `on_progress` gets how many are done and the best.

    Once `time_up` returns true or `each` raises `TimeUp`, the rest is not tried.
    """
    ranking = Ranking()
    hopeful = []
    for candidate in candidates:
        if candidate.unloaded < effort.target - MARGIN:
            ranking.found.append(Found(candidate, SearchOutcome.HOPELESS))
        else:
            hopeful.append(candidate)
    hopeful.sort(key=lambda candidate: -candidate.estimate / candidate.weight)
    best = None
    for wave in _waves(hopeful):
        ranking.timed_out = ranking.timed_out or time_up()
        untried = wave
        if not ranking.timed_out and ranking.requests < effort.max_requests:
            on_progress(len(ranking.found), best)
            try:
                for found in each(partial(measure, effort, ranking.value_to_beat(keep)), wave):
                    ranking.found.append(found)
                    untried = untried[1:]
                    best = found if best is None or found.value > best.value else best
                    on_progress(len(ranking.found), best)
            except TimeUp:
                ranking.timed_out = ranking.ended = True
        ranking.found += [Found(candidate, SearchOutcome.UNTRIED) for candidate in untried]
    ranking.found.sort(key=lambda each: -each.value)
    return ranking


def _waves(candidates: Sequence[Trial]) -> Iterator[list[Trial]]:
    """The first candidate alone, because all others are measured against it."""
    rest = iter(candidates)
    size = 1
    while wave := list(islice(rest, size)):
        yield wave
        size = WAVE


def measure(effort: Effort, value_to_beat: float, candidate: Trial) -> Found:
    """Its goodput, unless it misses the SLO at the rate it needs to exceed `value_to_beat`."""
    probes = Probes(candidate)
    cap = min(candidate.max_rate * SLACK, effort.enough)
    start = min(candidate.estimate, cap) / 2.0
    if value_to_beat > 0.0:
        start = value_to_beat * candidate.weight * (1.0 + effort.tolerance)
        if start > cap:
            return Found(candidate, SearchOutcome.BEATEN)
        (attained,) = probes.at([(start, effort.seed)])
        if attained.both < effort.target:
            return Found(candidate, SearchOutcome.BEATEN, requests=candidate.requests)
    search = Search(start, min(start, cap / FLOOR), cap, effort.tolerance)
    known = goodput(probes, search, candidate.slo, target=effort.target, seeds=(effort.seed,), gpus=candidate.gpus)
    return Found(candidate, SearchOutcome.MEASURED, known, len(known.probes) * candidate.requests, effort.enough)
