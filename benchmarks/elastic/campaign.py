"""Measures one workload of the campaign: goodput of all contenders, and outcomes over time."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from benchmarks.elastic.contenders import OURS, case_of, contender_named
from benchmarks.elastic.one import phase_outcomes
from benchmarks.elastic.per_phase import per_phase
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.record import (
    COLOCATED,
    KINDS,
    PER_PHASE,
    ROUTER,
    SPLIT,
    STATIC,
    SYSTEM,
    TIMETABLE,
    Entry,
    Phases,
    Result,
)
from benchmarks.elastic.record import OURS as KIND_OURS
from benchmarks.elastic.scenarios import Scenario
from benchmarks.elastic.search import (
    REACH,
    Best,
    Job,
    SearchEffort,
    Statics,
    best_colocated,
    best_split,
    jobs_of,
    searched,
)
from benchmarks.elastic.timeline import Timeline, timeline
from benchmarks.elastic.timetable import timetabled
from benchmarks.figures import Progress
from cluster.offline.scoring.goodput import Map

SHOWN = (KIND_OURS, *STATIC)
FORESEEN = 1.3  # times the best static choice's rate: the rate at which timetables are compared


class RecordMismatch(ValueError):
    """A record cannot be completed: the message names what is missing or different."""


def measure(
    scenario: Scenario,
    effort: SearchEffort,
    each: Map,
    progress: Progress,
    kinds: Collection[str] = KINDS,
    known: Result | None = None,
) -> Result:
    """Measure contenders of these kinds; the others come from `known`. Takes minutes per workload.

    Raises `RecordMismatch`, and what simulations raise.
    """
    begun_s = time.perf_counter()
    found = _statics(scenario, effort, each, progress, kinds, known)
    jobs, twins = _twins(scenario, jobs_of(scenario, found, effort, kinds), found)
    if PER_PHASE in kinds and len(scenario.phases) > 1:
        jobs.insert(0, per_phase(scenario, found, effort, each, progress))
    if TIMETABLE in kinds and scenario.shifts:
        ours = known.of(KIND_OURS) if known else None
        rate = ours.by_seed[0] if ours else FORESEEN * found.rate
        jobs.insert(0, timetabled(scenario, rate, effort, each, progress))
    new = searched(jobs, effort, each, progress)
    entries = _entries(new.entries, twins, kinds, known)
    if known is not None and not set(SHOWN) & set(kinds):
        shown = list(zip(known.phases, known.timelines, strict=True))
    else:
        shown = list(each(_shown, _shown_ones(scenario, entries, effort)))
    return Result(
        scenario=scenario.name,
        title=scenario.title,
        hardware=scenario.machines.hardware,
        gpus=case_of(OURS, scenario).gpus,
        workers=scenario.workers,
        slo=scenario.slo,
        shifts=scenario.shifts,
        seconds=scenario.seconds,
        boundaries=tuple((phase.name, phase.begin_s) for phase in scenario.phases),
        full_rate=scenario.rate,
        seeds=effort.seeds,
        tolerance=effort.tolerance,
        entries=entries,
        phases=tuple(phases for phases, _ in shown),
        timelines=tuple(line for _, line in shown),
        wall_s=round(time.perf_counter() - begun_s + (known.wall_s if known else 0.0), 1),
        failed=(*new.failed, *_failed_before(known, jobs)),
    )


# ---- measured and known contenders -------------------------------------------------------------------------------


def _statics(
    scenario: Scenario,
    effort: SearchEffort,
    each: Map,
    progress: Progress,
    kinds: Collection[str],
    known: Result | None,
) -> Statics:
    """The best static configurations, by the ladder or from the record."""
    if known is not None:
        _check_alike(scenario, known)
    split = best_split(scenario, effort, each, progress) if SPLIT in kinds else _known(scenario, known, SPLIT)
    if COLOCATED in kinds:
        return Statics(split, best_colocated(scenario, effort, each, progress, split.rate))
    return Statics(split, _known(scenario, known, COLOCATED))


def _check_alike(scenario: Scenario, known: Result) -> None:
    """A scale may mean another rate: goodputs are in requests/s. But closed forms also set how streams are mixed."""
    now = {"workers": scenario.workers, "seconds": scenario.seconds, "slo": scenario.slo}
    for name, value in now.items():
        if (before := getattr(known, name)) != value:
            raise RecordMismatch(
                f"{scenario.name}: {name} is {before} in the record and would be {value}; give the same --workers and "
                "--stretch, or measure the whole workload, without --again"
            )
    if len(scenario.streams) > 1 and known.full_rate != scenario.rate:
        raise RecordMismatch(
            f"{scenario.name}: the record has another mix of its {len(scenario.streams)} kinds of requests "
            f"({known.full_rate:.4g} requests/s at scale 1, now {scenario.rate:.4g}), because closed forms have "
            f"changed; measure the whole workload: python -m benchmarks.elastic {scenario.name}"
        )


def _known(scenario: Scenario, known: Result | None, kind: str) -> Best:
    entry = known.of(kind) if known else None
    if entry is None:
        raise RecordMismatch(f"{scenario.name}: the record has no {kind}; measure it too, with another --again")
    return Best((contender_named(entry.name),), entry.by_seed[0] or entry.rate or scenario.rate / REACH)


@dataclass(frozen=True, slots=True)
class _Twin:
    """A job that would measure one of the best static configurations under another name."""

    job: Job
    static: str


def _twins(scenario: Scenario, jobs: Sequence[Job], found: Statics) -> tuple[list[Job], list[_Twin]]:
    """The jobs left to measure, and those that equal a static configuration."""
    statics = (*found.split.contenders, *found.colocated.contenders)
    specs = [(one.name, case_of(one, scenario).spec) for one in statics]
    left, twins = [], []
    for job in jobs:
        spec = case_of(contender_named(job.name), scenario).spec
        static = next((name for name, each in specs if each == spec), "")
        if static and job.kind in (SYSTEM, ROUTER):
            twins.append(_Twin(job, static))
        else:
            left.append(job)
    return left, twins


def _entries(
    new: Sequence[Entry], twins: Sequence[_Twin], kinds: Collection[str], known: Result | None
) -> tuple[Entry, ...]:
    """Entries in order of kinds. Of the finalists of one kind only the best remains."""
    kept = [each for each in known.entries if each.kind not in kinds] if known else []
    entries = [*new, *kept]
    statics = {each.name: each for each in entries if each.kind in STATIC}
    for twin in twins:
        if (static := statics.get(twin.static)) is not None:
            entries.append(replace(static, kind=twin.job.kind, name=twin.job.name))
    made: list[Entry] = []
    for kind in KINDS:
        alike = [each for each in entries if each.kind == kind]
        made += sorted(alike, key=lambda each: -each.rate)[:1] if kind in SHOWN else alike
    return tuple(made)


def _failed_before(known: Result | None, jobs: Sequence[Job]) -> list[str]:
    names = {job.name for job in jobs}
    return [line for line in known.failed if line.partition(": ")[0] not in names] if known else []


# ---- outcomes over time ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shown:
    name: str
    scenario: Scenario
    rate: float
    seed: int


def _shown_ones(scenario: Scenario, entries: Sequence[Entry], effort: SearchEffort) -> list[_Shown]:
    """Ours and the best static configurations, all at the rate of the best of them."""
    shown = [each for each in entries if each.kind in SHOWN]
    rate = max((each.rate for each in shown), default=0.0) or scenario.rate / REACH
    return [_Shown(each.name, scenario, rate, effort.seeds[0]) for each in shown]


def _shown(wanted: _Shown) -> tuple[Phases, Timeline]:
    scenario, rate = wanted.scenario, wanted.rate
    run = ScenarioProbe(contender_named(wanted.name), scenario, None).run(rate / scenario.rate, wanted.seed, trace=True)
    return Phases(run.system, rate, phase_outcomes(run, scenario)), timeline(run, scenario, rate)
