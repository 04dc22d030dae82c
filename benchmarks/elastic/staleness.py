"""SLO attainment of routers by age of their statistics and number of gateways, at one load."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.elastic.contenders import OURS, SPLIT, Contender, View
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.record import Stale
from benchmarks.elastic.scenarios import Scenario, ScenarioSize, scenario
from benchmarks.figures import Progress
from cluster.offline.scoring.goodput import Map
from cluster.offline.sim.systems import balanced

WORKLOAD = "day"
SCALE = 0.5  # close to the capacity of a good split
SHORTER = 3.0  # shorter phases than in the campaign: runs are not aborted
CHUNK = 2048
SEEDS = (0, 1, 2)
AGES_S = (0.0, 0.25, 1.0, 4.0)
GATEWAYS = {"least-loaded": (1, 2, 4), "slo": (1, 2, 4), "": (1, 4)}  # by router; "" is ours, whose runs take longest


@dataclass(frozen=True, slots=True)
class _Job:
    contender: Contender
    scenario: Scenario
    view: View
    seed: int


def study(size: ScenarioSize, each: Map, progress: Progress) -> tuple[Stale, ...]:
    """Two routers on one split, and ours, at one total rate. Takes minutes."""
    load = scenario(WORKLOAD, replace(size, stretch=size.stretch / SHORTER))
    prefills = balanced(load.workers, load.machines.model().cost, load.draw(1.0, 0), load.fleet.engine)
    split = Contender(SPLIT, prefills, CHUNK, plain=True)
    cells = [
        (replace(split, routing=name) if name else OURS, View(stale_s, number))
        for name, numbers in GATEWAYS.items()
        for number in numbers
        for stale_s in AGES_S
    ]
    jobs = [_Job(one, load, view, seed) for one, view in cells for seed in SEEDS]
    attained = iter(each(_attained, jobs))
    made = [
        Stale(load.name, one.name, view.stale_s, view.gateways, SCALE * load.rate, _shares(attained))
        for one, view in cells
    ]
    progress(f"old views: {len(jobs)} runs")
    return tuple(made)


def _shares(attained: Iterator[float]) -> tuple[float, ...]:
    return tuple(round(next(attained), 4) for _ in SEEDS)


def _attained(job: _Job) -> float:
    return ScenarioProbe(job.contender, job.scenario, None, job.view)(SCALE * job.scenario.rate, job.seed).both
