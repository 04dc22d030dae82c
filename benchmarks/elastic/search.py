"""The best static configurations by a ladder search, and goodput by bisection.

The ladder: it starts at the goodput of a middling configuration and tries all others at that rate. Those that attain
the target are tried a rung higher, and so on until none does. While some succeed, two, four and more rungs are climbed
at once, and fewer afterwards. So most configurations need a single run, which ends once it cannot attain the target.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.elastic.contenders import (
    CHUNKS,
    OURS,
    PROMPT_CHUNKS,
    ROUTERS,
    Contender,
    colocated,
    contender_named,
    named,
    routed,
    splits,
)
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.record import COLOCATED, KINDS, ROUTER, SPLIT, SYSTEM, Entry
from benchmarks.elastic.record import OURS as KIND_OURS
from benchmarks.elastic.scenarios import Scenario
from benchmarks.figures import Progress
from cluster.offline.scoring.goodput import Attain, Map, Probes, Search, goodput
from workers.request import SLO

TARGET = 0.9
REACH = 16.0  # rates from 1/16 to 16 times the start
STRIDE = 1.1  # first factor of a search from a start that should be close; at least its tolerance
LEAP = 1.5  # maximum factor of one climb


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """`seeds`: for ours, the best static configurations, those per phase, the best system and the best router.

    `few`: seeds of the others. `rung`: relative step of the ladder. `finalists`: number of configurations of the last
    rung that are searched with all seeds.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    few: tuple[int, ...] = (0,)
    tolerance: float = 0.05
    rough: float = 0.1  # tolerance for named systems and routers
    rung: float = 0.05
    finalists: int = 2
    systems: tuple[str, ...] = ()  # empty: all
    routers: tuple[str, ...] = ROUTERS
    prompt_chunks: tuple[int, ...] = PROMPT_CHUNKS
    chunks: tuple[int, ...] = CHUNKS


@dataclass(frozen=True, slots=True)
class Job:
    """A goodput to search, in requests per second of the whole fleet. A plain value, so it can be pickled."""

    kind: str
    name: str
    attain: Attain
    slo: SLO
    start: float
    seeds: tuple[int, ...]
    tolerance: float
    prefills: int = 0

    @classmethod
    def of(cls, kind: str, probe: ScenarioProbe, start: float, seeds: tuple[int, ...], tolerance: float) -> "Job":
        one = probe.contender
        return cls(kind, one.name, probe, probe.scenario.slo, start, seeds, tolerance, one.prefills)

    def held(self, seed: int, start: float, stride: float) -> float:
        """The highest rate at which this seed attained the target, or 0."""
        low, high = self.start / REACH, self.start * REACH
        search = Search(min(max(low, start), high), low, high, self.tolerance, stride)
        return goodput(Probes(self.attain), search, self.slo, target=TARGET, seeds=(seed,), gpus=1).rate


def _held(job: Job, seed: int, start: float, stride: float) -> float | str:
    """The goodput, or an error message: one failing contender must not end a campaign of hours."""
    try:
        return job.held(seed, start, stride)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`failed`: names and errors of contenders that raised."""

    entries: tuple[Entry, ...]
    failed: tuple[str, ...]


def searched(jobs: Sequence[Job], effort: SearchEffort, each: Map, progress: Progress) -> SearchResult:
    """Search the first seed of all jobs, then the other seeds from there; all seeds for the best system and router."""
    strides = [max(STRIDE, 1.0 + job.tolerance) for job in jobs]
    firsts = []
    for job, first in zip(jobs, each(_held, jobs, *_begun(jobs), strides), strict=True):
        firsts.append(first)
        progress(
            f"{job.kind}, {job.name}: {first if isinstance(first, str) else f'{first:.3g} requests/s'}, first seed"
        )
    later = list(jobs)
    later_runs = [(number, seed) for number, job in enumerate(jobs) for seed in job.seeds[1:]]
    outcomes: list[list[float | str]] = [[first] for first in firsts]
    for number in _finalists(jobs, firsts, effort):
        later[number] = replace(jobs[number], seeds=effort.seeds, tolerance=effort.tolerance)
        outcomes[number] = []
        later_runs += [(number, seed) for seed in effort.seeds]
    starts = [first if isinstance(first, float) and first > 0.0 else jobs[n].start for n, first in enumerate(firsts)]
    more = each(
        _held,
        [later[number] for number, _ in later_runs],
        [seed for _, seed in later_runs],
        [starts[number] for number, _ in later_runs],
        [1.0 + later[number].tolerance for number, _ in later_runs],
    )
    for (number, _), outcome in zip(later_runs, more, strict=True):
        outcomes[number].append(outcome)
    made, failed = [], []
    for job, found in zip(jobs, outcomes, strict=True):
        broke = next((outcome for outcome in found if isinstance(outcome, str)), None)
        if broke is not None:
            failed.append(f"{job.name}: {broke}")
            progress(failed[-1])
            continue
        made.append(Entry.of(job.kind, job.name, [each for each in found if isinstance(each, float)], job.prefills))
        progress(f"{job.kind}, {job.name}: {made[-1].rate:.3f} requests/s")
    return SearchResult(tuple(made), tuple(failed))


def _begun(jobs: Sequence[Job]) -> tuple[list[int], list[float]]:
    return [job.seeds[0] for job in jobs], [job.start for job in jobs]


def _finalists(jobs: Sequence[Job], firsts: Sequence[float | str], effort: SearchEffort) -> Iterator[int]:
    """The best named system and the best router except ours, which have few seeds so far."""
    for kind in (SYSTEM, ROUTER):
        known = [
            (first, number)
            for number, (job, first) in enumerate(zip(jobs, firsts, strict=True))
            if job.kind == kind and isinstance(first, float) and not contender_named(job.name).is_ours_in_part
        ]
        if known and (effort.seeds, effort.tolerance) != (effort.few, effort.rough):
            yield max(known)[1]


# ---- the best static configurations ------------------------------------------------------------------------------


def _holds(contender: Contender, scenario: Scenario, rate: float, seed: int) -> bool:
    return ScenarioProbe(contender, scenario, TARGET)(rate, seed).both >= TARGET


@dataclass(frozen=True, slots=True)
class Best:
    """The configurations that attained the target on the last rung, and its rate in requests per second."""

    contenders: tuple[Contender, ...]
    rate: float


def pilot(scenario: Scenario, contender: Contender, start: float, effort: SearchEffort) -> Best:
    """The start of a ladder: one configuration's goodput, to the precision of a rung."""
    job = Job.of(SPLIT, ScenarioProbe(contender, scenario), start, effort.seeds[:1], effort.rung)
    return Best((contender,), job.held(effort.seeds[0], start, 2.0) or start / REACH)


def ladder(
    scenario: Scenario, best: Best, others: Sequence[Contender], effort: SearchEffort, each: Map, progress: Progress
) -> Best:
    """Search the best of `others`; `best` is the best so far, which failed at the next rung."""
    alive, leap, rising = [one for one in others if one not in best.contenders], 1.0, True
    while alive:
        count, rate = len(alive), best.rate * leap
        outcomes = each(_holds, alive, [scenario] * count, [rate] * count, [effort.seeds[0]] * count)
        held = [one for one, holds in zip(alive, outcomes, strict=True) if holds]
        names = ", ".join(one.name for one in held[:4]) or "no other"
        progress(f"{scenario.name}: of {count}, {len(held)} attain the target at {rate:.3g} requests/s: {names}")
        if held:
            alive, best = held, Best(tuple(held[: effort.finalists]), rate)
        rising = rising and bool(held)
        if not rising and leap < 1.0 + 1.01 * effort.rung:
            break
        leap = leap**0.5 if not rising else 1.0 + effort.rung if leap == 1.0 else min(leap**2, LEAP)
    return best


@dataclass(frozen=True, slots=True)
class Statics:
    """The best static configurations."""

    split: Best
    colocated: Best

    @property
    def rate(self) -> float:
        return max(self.split.rate, self.colocated.rate)

    @property
    def better(self) -> Contender:
        return max((self.split, self.colocated), key=lambda best: best.rate).contenders[0]


def best_split(
    scenario: Scenario, effort: SearchEffort, each: Map, progress: Progress, start: float | None = None
) -> Best:
    """First over all numbers of prefill workers with a middling chunk; then over chunks, near the best number."""
    middle, workers = effort.prompt_chunks[len(effort.prompt_chunks) // 2], scenario.workers
    candidates = tuple(splits(workers, (middle,)))
    best = pilot(scenario, candidates[len(candidates) // 2], start or 0.4 * scenario.rate, effort)
    best = ladder(scenario, best, candidates, effort, each, progress)
    near = {k for one in best.contenders for k in (one.prefills - 1, one.prefills, one.prefills + 1)}
    others = [one for one in splits(workers, effort.prompt_chunks) if one.prefills in near and one not in candidates]
    return ladder(scenario, best, others, effort, each, progress)


def best_colocated(scenario: Scenario, effort: SearchEffort, each: Map, progress: Progress, start: float) -> Best:
    mixed = tuple(colocated(effort.chunks))
    return ladder(scenario, pilot(scenario, mixed[len(mixed) // 2], start, effort), mixed, effort, each, progress)


def statics(
    scenario: Scenario, effort: SearchEffort, each: Map, progress: Progress, start: float | None = None
) -> Statics:
    split = best_split(scenario, effort, each, progress, start)
    return Statics(split, best_colocated(scenario, effort, each, progress, split.rate))


# ---- all contenders -----------------------------------------------------------------------------------------------


def jobs_of(scenario: Scenario, found: Statics, effort: SearchEffort, kinds: Collection[str] = KINDS) -> list[Job]:
    """Jobs for ours, the finalists, every named system and every router, of these kinds; none per phase."""
    made: list[Job] = []

    def fine(kind: str, one: Contender, start: float) -> None:
        made.append(Job.of(kind, ScenarioProbe(one, scenario), start, effort.seeds, effort.tolerance))

    def rough(kind: str, one: Contender, start: float) -> None:
        made.append(Job.of(kind, ScenarioProbe(one, scenario), start, effort.few, effort.rough))

    fine(KIND_OURS, OURS, found.rate)
    for kind, best in ((SPLIT, found.split), (COLOCATED, found.colocated)):
        for one in best.contenders:
            fine(kind, one, best.rate)
    split, better = found.split.contenders[0], found.better
    for one in named(split.prefills):
        if not effort.systems or one.system in effort.systems:
            rough(SYSTEM, one, 0.8 * found.rate)
    for one in routed(split, better, effort.routers):
        rough(ROUTER, one, found.rate if one.prefills == better.prefills else found.split.rate)
    return [job for job in made if job.kind in kinds]
