"""The best of many candidates without measuring each: the rest need only be shown to be worse. Pure.

A candidate's value is its goodput for each unit of its weight. Those that look best are measured first; each further
one is tried at the rate that it would need to be better, once, and measured only if it holds. What cannot meet the
promise even without load is not tried at all, nor is a rate that nobody could sustain: a run of some hundred requests
is over before a queue shows. With attainment that falls with the rate, the answer is that of measuring all of them, to
the tolerance.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from math import inf

from cluster.offline.plan.trial import MARGIN, Trial
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, TimeUp, goodput

WAVE = 4  # candidates that are tried at once; the answer does not depend on how many processes there are
SLACK = 1.1  # `most` is that of the mean request; a goodput above so many times it is a run that was too short
LEAST = 256.0  # a search ends at `most` over this


class SearchOutcome(Enum):
    """What became of a candidate."""

    MEASURED = "measured"
    BEATEN = "worse than what is known"
    HOPELESS = "misses the promise without any load"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Found:
    """`goodput` of what was measured. `requests`: simulated for it. A rate above `enough` is worth nothing more."""

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
    """How a search is made: for this attained share, with these seeds, to this relative tolerance, until so many
    requests have been simulated. No rate above `enough` is looked at."""

    target: float
    seeds: tuple[int, ...] = (0,)
    tolerance: float = 0.05
    most_requests: int = 1_000_000
    enough: float = inf


@dataclass(slots=True)
class Ranking:
    """All candidates, the most valuable first."""

    found: list[Found] = field(default_factory=list)
    hurried: bool = False  # the time was up before all were tried

    @property
    def best(self) -> list[Found]:
        """Those that attain something."""
        return [each for each in self.found if each.rate > 0.0]

    @property
    def requests(self) -> int:
        return sum(each.requests for each in self.found)

    def count(self, outcome: SearchOutcome) -> int:
        return sum(each.outcome is outcome for each in self.found)

    def _beat(self, keep: int | None) -> float:
        """The value that one more must exceed to be among the `keep` best; 0: any."""
        values = sorted((each.value for each in self.found), reverse=True)
        return values[keep - 1] if keep is not None and len(values) >= keep else 0.0

    def sort(self) -> None:
        self.found.sort(key=lambda each: -each.value)


def best_of(
    candidates: Sequence[Trial],
    effort: Effort,
    each: Map = map,
    *,
    keep: int | None = 1,
    told: Callable[[int, int, Found | None], None] = lambda done, total, best: None,
    hurry: Callable[[], bool] = lambda: False,
) -> Ranking:
    """The `keep` best (None: all are measured). `each` may be an executor's `map`; `told` hears how many are done, and
    the best so far. Once `hurry` says so or `each` raises `TimeUp`, the rest is not tried."""
    ranking: Ranking = Ranking()
    hopeful = []
    for candidate in candidates:
        if candidate.alone < effort.target - MARGIN:
            ranking.found.append(Found(candidate, SearchOutcome.HOPELESS))
        else:
            hopeful.append(candidate)
    hopeful.sort(key=lambda candidate: -candidate.estimate / candidate.weight)
    best = None
    for wave in _waves(hopeful):
        ranking.hurried = ranking.hurried or hurry()
        if ranking.hurried or ranking.requests >= effort.most_requests:
            ranking.found += [Found(candidate, SearchOutcome.UNTRIED) for candidate in wave]
            continue
        told(len(ranking.found), len(candidates), best)
        tried = 0
        try:
            for found in each(partial(measure, effort, ranking._beat(keep)), wave):
                ranking.found.append(found)
                tried += 1
                best = found if best is None or found.value > best.value else best
                told(len(ranking.found), len(candidates), best)
        except TimeUp:
            ranking.hurried = True
            ranking.found += [Found(candidate, SearchOutcome.UNTRIED) for candidate in wave[tried:]]
    ranking.sort()
    return ranking


def _waves(candidates: Sequence[Trial]) -> Iterator[list[Trial]]:
    """The first alone: all others are measured against it."""
    rest = iter(candidates)
    size = 1
    while wave := list(islice(rest, size)):
        yield wave
        size = WAVE


def measure(effort: Effort, beat: float, candidate: Trial) -> Found:
    """Its goodput, unless it does not hold the rate that it needs to be worth more than `beat`."""
    probes = Probes(candidate)
    cap = min(candidate.most * SLACK, effort.enough)
    start = min(candidate.estimate, cap) / 2.0
    if beat > 0.0:
        start = beat * candidate.weight * (1.0 + effort.tolerance)
        if start > cap:
            return Found(candidate, SearchOutcome.BEATEN)
        (attained,) = probes.at([(start, effort.seeds[0])])
        if attained.both < effort.target:
            return Found(candidate, SearchOutcome.BEATEN, requests=candidate.requests)
    search = Search(start, min(start, cap / LEAST), cap, effort.tolerance)
    known = goodput(probes, search, candidate.slo, target=effort.target, seeds=effort.seeds, gpus=candidate.gpus)
    return Found(candidate, SearchOutcome.MEASURED, known, len(known.probes) * candidate.requests, effort.enough)
