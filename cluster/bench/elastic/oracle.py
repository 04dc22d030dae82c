"""What changes of roles alone could give at most, by an oracle that knows the phases.

For each phase it has the static configuration that suits it best, switched in no time at the boundary, and nothing is
carried over: every phase begins on an idle fleet. What it attains is the mean over phases, weighted by requests. A
router that is better than least-loaded, or workers that take part in both phases, may still exceed it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.bench.elastic.contenders import Contender
from cluster.bench.elastic.probe import Probe
from cluster.bench.elastic.record import ORACLE, Entry
from cluster.bench.elastic.scenarios import Phase, Scenario
from cluster.bench.elastic.search import REACH, TARGET, Effort, statics
from cluster.scoring.figures import Attainment, attainment
from cluster.scoring.goodput import Map, Probes, Search, goodput

NAMES = ("ttft", "tpot", "both", "served")


@dataclass(frozen=True, slots=True)
class Oracle:
    """`chosen`: for phases of each name, the configurations that come into question; of these the better."""

    scenario: Scenario
    chosen: Mapping[str, tuple[Contender, ...]]

    def __call__(self, rate: float, seed: int) -> Attainment:
        scale = rate / self.scenario.rate
        arrivals = self.scenario.draw(scale, seed).arrivals
        parts = [
            (came / len(arrivals), self._best(phase, scale, seed))
            for phase in self.scenario.phases
            if (came := sum(phase.begin_s <= each.at_s < phase.end_s for each in arrivals))
        ]
        return Attainment(*(sum(share * getattr(found, name) for share, found in parts) for name in NAMES))

    def _best(self, phase: Phase, scale: float, seed: int) -> Attainment:
        alone = self.scenario.only(phase)
        runs = (Probe(one, alone, None).run(scale, seed) for one in self.chosen[phase.name])
        return max((attainment(run, alone.slo) for run in runs), key=lambda found: found.both)

    @property
    def told(self) -> str:
        return "; ".join(f"{name}: {' or '.join(one.name for one in ones)}" for name, ones in self.chosen.items())


def foreseen(scenario: Scenario, effort: Effort, each: Map) -> Oracle:
    """The best configurations for each kind of phase, by the ladder on that phase alone."""
    chosen = {}
    for phase in scenario.phases:
        if phase.name not in chosen:
            found = statics(scenario.only(phase), replace(effort, finalists=1), each)
            near = (1.0 - 2.0 * effort.rung) * found.rate
            split = found.split if found.split_rate >= near else ()
            colocated = found.colocated if found.colocated_rate >= near else ()
            chosen[phase.name] = (*split, *colocated)
    return Oracle(scenario, chosen)


def oracle(scenario: Scenario, start: float, effort: Effort, each: Map, gpus: int) -> Entry:
    """Its goodput, searched from `start` requests a second on."""
    found = foreseen(scenario, effort, each)
    search = Search(start, start / REACH, start * REACH, effort.tolerance)
    made = goodput(Probes(found, each), search, scenario.slo, target=TARGET, seeds=effort.seeds, gpus=gpus)
    return Entry.of(ORACLE, found.told, made)
