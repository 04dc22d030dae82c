"""How routers bear a view that is old: the same split and load for each, statistics that come later and later."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.bench.elastic.contenders import OURS, SPLIT, Contender, View
from cluster.bench.elastic.probe import Probe
from cluster.bench.elastic.record import Stale
from cluster.bench.elastic.scenarios import Scenario, Size, scenario
from cluster.bench.elastic.search import Effort, Tell
from cluster.scoring.goodput import Map
from cluster.sim.systems import balanced
from cluster.spec import ROUTING

WORKLOAD = "day"
SCALE = 0.45  # near what a good split just keeps
CHUNK = 2048
VIEWS = (View(), *(View(stale_s, gateways=4) for stale_s in (0.0, 0.1, 0.5, 2.0)))


@dataclass(frozen=True, slots=True)
class _Job:
    contender: Contender
    scenario: Scenario
    view: View
    seed: int


def study(size: Size, effort: Effort, each: Map, tell: Tell) -> tuple[Stale, ...]:
    """Every router by name on one split, and ours as it is."""
    load = scenario(WORKLOAD, replace(size, stretch=size.stretch / 2.0))
    prefills = balanced(load.workers, load.machines.model().cost, load.draw(1.0, 0), load.fleet.engine)
    contenders = (*(Contender(SPLIT, prefills, CHUNK, plain=True, routing=name) for name in ROUTING), OURS)
    seeds = effort.seeds[:2]
    jobs = [_Job(one, load, view, seed) for one in contenders for view in VIEWS for seed in seeds]
    kept = iter(each(_attained, jobs))
    made = list(_rows(contenders, kept, load, len(seeds)))
    tell(f"old views: {len(contenders)} routers")
    return tuple(made)


def _rows(contenders: tuple[Contender, ...], kept: Iterator[float], load: Scenario, seeds: int) -> Iterator[Stale]:
    for one in contenders:
        for view in VIEWS:
            shares = tuple(round(next(kept), 4) for _ in range(seeds))
            yield Stale(load.name, one.name, view.stale_s, view.gateways, SCALE * load.rate, shares)


def _attained(job: _Job) -> float:
    return Probe(job.contender, job.scenario, None, job.view)(SCALE * job.scenario.rate, job.seed).both
