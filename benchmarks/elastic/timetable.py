"""Our router with roles by timetable: what an elastic rule that knows the load beforehand could attain.

Unlike the best static per phase (`per_phase`), everything is carried over: queues and answers under way meet the next
phase, and roles change as they do in a cluster, one worker after the other. For each kind of phase a number of prefill
workers is searched, for all together how long before the boundary roles change: one after the other, each the best for
the others as they are, until none becomes better.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.elastic.contenders import OURS, case_of
from benchmarks.elastic.probe import quietly
from benchmarks.elastic.record import TIMETABLE
from benchmarks.elastic.scenarios import Scenario
from benchmarks.elastic.search import TARGET, Job, SearchEffort
from benchmarks.figures import Progress
from cluster.offline.plan.trial import last_deadline_s
from cluster.offline.scoring.figures import Attainment, attainment
from cluster.offline.scoring.goodput import Map
from cluster.offline.sim.cluster import Environment
from cluster.offline.sim.run import RunOptions, simulate
from cluster.policy.scaling.load_report import LoadReport
from cluster.spec import ElasticSpec, Role
from diptych.view import ClusterView, Decision, WorkerState, WorkerView

PERIOD_S = 0.25  # in which one worker changes its role
AHEAD_S = (0.0, 4.0, 8.0)
ROUNDS = 2


@dataclass(slots=True)
class Timetable:
    """Decides by the clock alone, from the first question on. `entries`: from when on how many workers prefill.

    The others decode; with 0, all do both.
    """

    entries: tuple[tuple[float, int], ...]
    _begun_s: float | None = field(default=None, init=False)

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """It knows without being told."""

    def decide(self, view: ClusterView, now_s: float) -> Decision | None:
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        prefills = [count for at_s, count in self.entries if at_s <= now_s - self._begun_s or at_s <= 0.0][-1]
        workers = [worker for worker in view.workers if worker.state is WorkerState.READY]
        wanted = {Role.PREFILL: prefills, Role.DECODE: len(workers) - prefills, Role.MIXED: 0}
        if not prefills:
            wanted = {Role.PREFILL: 0, Role.DECODE: 0, Role.MIXED: len(workers)}
        there = {role: sum(worker.role is role for worker in workers) for role in Role}
        lacking = next((role for role in Role if there[role] < wanted[role]), None)
        if lacking is None:
            return None
        free = [worker for worker in workers if there[worker.role] > wanted[worker.role]]
        worker = min(free, key=_work)
        return Decision("flip", "by the timetable", worker=worker.name, role=lacking)


def _work(worker: WorkerView) -> tuple[int, int, str]:
    stats = worker.stats
    return stats.queued_tokens, stats.running + stats.reserved, worker.name


@dataclass(frozen=True, slots=True)
class TimetableProbe:
    """`prefills`: workers that prefill in each kind of phase, by its name. A value, so it can go to another process."""

    scenario: Scenario
    prefills: Mapping[str, int]
    ahead_s: float = 0.0
    give_up: float | None = TARGET

    def __call__(self, rate: float, seed: int) -> Attainment:
        scenario, case = self.scenario, case_of(OURS, self.scenario)
        workload = scenario.draw(rate / scenario.rate, seed)
        missed = None if self.give_up is None else int((1.0 - self.give_up) * len(workload.arrivals) + 1e-6)
        entries = tuple((phase.begin_s - self.ahead_s, self.prefills[phase.name]) for phase in scenario.phases)
        environment = Environment(decider=Timetable(entries))
        spec = replace(case.spec, elastic=ElasticSpec(mode="act", period_s=PERIOD_S))
        until_s = last_deadline_s(workload, scenario.slo)
        options = RunOptions(seed, scenario.slo, until_s=until_s, max_missed=missed, environment=environment)
        with quietly():
            run = simulate(spec, case.models, replace(workload, name=scenario.name), options)
        return attainment(run, scenario.slo)

    @property
    def name(self) -> str:
        counts = self.prefills.items()
        roles = ", ".join(f"{name}: {count} prefill" if count else f"{name}: mixed" for name, count in counts)
        return f"{roles}; {self.ahead_s:g} s ahead"


def timetabled(scenario: Scenario, rate: float, effort: SearchEffort, each: Map, progress: Progress) -> Job:
    """The best timetable found at this rate, to be searched for its goodput."""
    middle = scenario.workers // 2
    best = TimetableProbe(scenario, {phase.name: middle for phase in scenario.phases}, give_up=None)
    kept = -1.0
    for _ in range(ROUNDS):
        before = kept
        for change in (*best.prefills, ""):
            others = _others(best, change)
            found = list(each(_kept, others, [rate] * len(others), [effort.seeds[0]] * len(others)))
            if max(found) > kept:
                kept, best = max(found), others[found.index(max(found))]
        progress(f"{scenario.name}: {kept:.1%} kept at {rate:.3g} requests/s by {best.name}")
        if kept <= before:
            break
    return Job(TIMETABLE, best.name, replace(best, give_up=TARGET), scenario.slo, rate, effort.seeds, effort.tolerance)


def _others(best: TimetableProbe, phase: str) -> list[TimetableProbe]:
    """With other numbers in this kind of phase; without one, with other times."""
    if not phase:
        return [replace(best, ahead_s=ahead_s) for ahead_s in AHEAD_S]
    numbers = range(best.scenario.workers)
    return [replace(best, prefills={**best.prefills, phase: number}) for number in numbers]


def _kept(foretold: TimetableProbe, rate: float, seed: int) -> float:
    return foretold(rate, seed).both
