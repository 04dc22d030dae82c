"""One workload of the campaign: all its contenders, the oracle, and what became of ours over time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.elastic.contenders import OURS, Contender, case_of
from cluster.bench.elastic.one import told
from cluster.bench.elastic.oracle import oracle
from cluster.bench.elastic.probe import Probe
from cluster.bench.elastic.record import Entry, Phases, Result
from cluster.bench.elastic.scenarios import Scenario
from cluster.bench.elastic.search import Effort, Statics, Tell, goodputs, statics
from cluster.bench.elastic.timeline import Timeline, timeline
from cluster.scoring.goodput import Map


def measure(scenario: Scenario, effort: Effort, each: Map, tell: Tell) -> Result:
    """Raises what simulations raise. Minutes for a workload."""
    begun_s = time.perf_counter()
    gpus = case_of(OURS, scenario).gpus
    found = statics(scenario, effort, each, tell)
    goodput = goodputs(scenario, found, effort, each, tell)
    made = list(goodput.entries)
    if len(scenario.phases) > 1:
        made.append(oracle(scenario, found, effort, each, tell, gpus))
        tell(f"{scenario.name}: oracle {made[-1].rate / gpus:.3f} requests/s and GPU")
    shown = list(each(_shown, _shown_ones(scenario, found, made, effort)))
    return Result(
        scenario=scenario.name,
        title=scenario.title,
        hardware=scenario.machines.hardware,
        gpus=gpus,
        workers=scenario.workers,
        slo=scenario.slo,
        shifts=scenario.shifts,
        seconds=scenario.seconds,
        boundaries=tuple((phase.name, phase.begin_s) for phase in scenario.phases),
        full_rate=scenario.rate,
        seeds=effort.seeds,
        tolerance=effort.tolerance,
        entries=tuple(made),
        phases=tuple(phases for phases, _ in shown),
        timelines=tuple(line for _, line in shown),
        wall_s=round(time.perf_counter() - begun_s, 1),
        failed=goodput.failed,
    )


@dataclass(frozen=True, slots=True)
class _Shown:
    contender: Contender
    scenario: Scenario
    rate: float
    seed: int


def _shown_ones(scenario: Scenario, found: Statics, made: Sequence[Entry], effort: Effort) -> list[_Shown]:
    """Ours and the best static configurations, all at the rate of the best of them."""
    by_name = {entry.name: entry.rate for entry in made}
    contenders = [one for one in (OURS, *found.split.contenders, *found.colocated.contenders) if one.name in by_name]
    rate = max(by_name[one.name] for one in contenders)
    return [_Shown(one, scenario, rate, effort.seeds[0]) for one in contenders]


def _shown(wanted: _Shown) -> tuple[Phases, Timeline]:
    scenario, rate = wanted.scenario, wanted.rate
    run = Probe(wanted.contender, scenario, None).run(rate / scenario.rate, wanted.seed, trace=True)
    return Phases(run.system, rate, told(run, scenario)), timeline(run, scenario, rate)
