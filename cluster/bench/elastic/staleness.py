"""How routers bear a view that is old: the same load for each, statistics that come later and later, more gateways."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.bench.elastic.contenders import OURS, SPLIT, Contender, View
from cluster.bench.elastic.probe import Probe
from cluster.bench.elastic.record import Stale
from cluster.bench.elastic.scenarios import Scenario, Size, scenario
from cluster.bench.elastic.search import Tell
from cluster.scoring.goodput import Map
from cluster.sim.systems import balanced

WORKLOAD = "day"
SCALE = 0.45  # near what a good split just keeps
CHUNK = 2048
SEEDS = (0, 1, 2)
ROUTERS = ("least-loaded", "promise")
VIEWS = tuple(View(stale_s, gateways) for gateways in (1, 2, 4) for stale_s in (0.0, 0.25, 1.0, 4.0))


@dataclass(frozen=True, slots=True)
class _Job:
    contender: Contender
    scenario: Scenario
    view: View
    seed: int


def study(size: Size, each: Map, tell: Tell) -> tuple[Stale, ...]:
    """Two routers on one split, and ours as it is, at one rate that all gateways share. Minutes."""
    load = scenario(WORKLOAD, replace(size, stretch=size.stretch / 2.0))
    prefills = balanced(load.workers, load.machines.model().cost, load.draw(1.0, 0), load.fleet.engine)
    contenders = (*(Contender(SPLIT, prefills, CHUNK, plain=True, routing=name) for name in ROUTERS), OURS)
    jobs = [_Job(one, load, view, seed) for one in contenders for view in VIEWS for seed in SEEDS]
    kept = iter(each(_attained, jobs))
    made = list(_rows(contenders, kept, load))
    tell(f"old views: {len(jobs)} runs")
    return tuple(made)


def _rows(contenders: Sequence[Contender], kept: Iterator[float], load: Scenario) -> Iterator[Stale]:
    for one in contenders:
        for view in VIEWS:
            shares = tuple(round(next(kept), 4) for _ in SEEDS)
            yield Stale(load.name, one.name, view.stale_s, view.gateways, SCALE * load.rate, shares)


def _attained(job: _Job) -> float:
    return Probe(job.contender, job.scenario, None, job.view)(SCALE * job.scenario.rate, job.seed).both
