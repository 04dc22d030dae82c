"""Our router with roles by timetable: the reference of an elastic policy that knows the load in advance.

Unlike the best static configuration per phase (`per_phase`), queues and running answers continue into the next phase,
and roles change one worker after the other, as in a cluster. The search sets the number of prefill workers for each
kind of phase, and how early roles change before a phase. It optimizes one value at a time until none
improves (coordinate descent).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.elastic.contenders import OURS, case_of
from benchmarks.elastic.probe import log_errors
from benchmarks.elastic.record import TIMETABLE
from benchmarks.elastic.scenarios import Scenario
from benchmarks.elastic.search import TARGET, Job, SearchEffort
from benchmarks.figures import Progress
from cluster.offline.plan.trial import last_deadline_s
from cluster.offline.scoring.figures import Attainment, attainment, most_missed
from cluster.offline.scoring.goodput import Map
from cluster.offline.sim.cluster import Environment
from cluster.offline.sim.run import RunOptions, simulate
from cluster.policy.scaling.offered_load import LoadReport
from cluster.spec import ElasticSpec, Role
from diptych.view import ClusterView, Decision, WorkerState, WorkerView

PERIOD_S = 0.25  # between two role changes
AHEAD_S = (0.0, 4.0, 8.0)
ROUNDS = 2


@dataclass(slots=True)
class Timetable:
    """Decides by the clock, starting at the first call. `entries`: (start, prefill workers); the others decode.

    With 0 prefill workers, all are mixed.
    """

    entries: tuple[tuple[float, int], ...]
    _begun_s: float | None = field(default=None, init=False)

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """A timetable ignores load reports."""

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
    """`prefills`: prefill workers by phase name. A plain value, so it can be pickled."""

    scenario: Scenario
    prefills: Mapping[str, int]
    ahead_s: float = 0.0
    give_up: float | None = TARGET

    def __call__(self, rate: float, seed: int) -> Attainment:
        scenario, case = self.scenario, case_of(OURS, self.scenario)
        workload = scenario.draw(rate / scenario.rate, seed)
        missed = None if self.give_up is None else most_missed(self.give_up, len(workload.arrivals))
        entries = tuple((phase.begin_s - self.ahead_s, self.prefills[phase.name]) for phase in scenario.phases)
        environment = Environment(scaling_policy=Timetable(entries))
        spec = replace(case.spec, elastic=ElasticSpec(mode="act", period_s=PERIOD_S))
        until_s = last_deadline_s(workload, scenario.slo)
        options = RunOptions(seed, scenario.slo, until_s=until_s, max_missed=missed, environment=environment)
        with log_errors():
            run = simulate(spec, case.models, replace(workload, name=scenario.name), options)
        return attainment(run, scenario.slo)

    @property
    def name(self) -> str:
        counts = self.prefills.items()
        roles = ", ".join(f"{name}: {count} prefill" if count else f"{name}: mixed" for name, count in counts)
        return f"{roles}; {self.ahead_s:g} s ahead"


def timetabled(scenario: Scenario, rate: float, effort: SearchEffort, each: Map, progress: Progress) -> Job:
    """The job that searches the goodput of the best timetable at this rate."""
    middle = scenario.workers // 2
    best = TimetableProbe(scenario, {phase.name: middle for phase in scenario.phases}, give_up=None)
    attained = -1.0
    for _ in range(ROUNDS):
        before = attained
        for change in (*best.prefills, ""):
            others = _others(best, change)
            found = list(each(_attained, others, [rate] * len(others), [effort.seeds[0]] * len(others)))
            if max(found) > attained:
                attained, best = max(found), others[found.index(max(found))]
        progress(f"{scenario.name}: {attained:.1%} attained at {rate:.3g} requests/s by {best.name}")
        if attained <= before:
            break
    return Job(TIMETABLE, best.name, replace(best, give_up=TARGET), scenario.slo, rate, effort.seeds, effort.tolerance)


def _others(best: TimetableProbe, phase: str) -> list[TimetableProbe]:
    """Variants with other numbers of prefill workers in this phase; with an empty name, with other lead times."""
    if not phase:
        return [replace(best, ahead_s=ahead_s) for ahead_s in AHEAD_S]
    numbers = range(best.scenario.workers)
    return [replace(best, prefills={**best.prefills, phase: number}) for number in numbers]


def _attained(foretold: TimetableProbe, rate: float, seed: int) -> float:
    return foretold(rate, seed).both
