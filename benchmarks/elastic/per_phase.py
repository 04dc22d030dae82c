"""The best static configuration of each phase: a reference, not a bound.

Each phase runs on the static configuration that suits it best. Switching is instant, and every phase begins on an idle
fleet. Attainment is the mean over phases, weighted by requests. A router better than least-loaded, or mixed workers,
can exceed it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.elastic.contenders import Contender
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.record import PER_PHASE
from benchmarks.elastic.scenarios import Scenario, ScenarioPhase
from benchmarks.elastic.search import TARGET, Job, SearchEffort, Statics, statics
from benchmarks.figures import Progress
from cluster.offline.scoring.figures import Attainment, attainment
from cluster.offline.scoring.goodput import Map

NAMES = ("ttft", "tpot", "both", "served")


@dataclass(frozen=True, slots=True)
class PerPhase:
    """`chosen`: candidate configurations by phase name; the better one counts."""

    scenario: Scenario
    chosen: Mapping[str, tuple[Contender, ...]]

    def __call__(self, rate: float, seed: int) -> Attainment:
        """Ends as soon as more requests than allowed have missed; those of later phases then count as missed."""
        scale = rate / self.scenario.rate
        arrivals = self.scenario.draw(scale, seed).arrivals
        left, kept = (1.0 - TARGET) * len(arrivals), dict.fromkeys(NAMES, 0.0)
        for phase in self.scenario.epochs or self.scenario.phases:
            came = sum(phase.begin_s <= each.at_s < phase.end_s for each in arrivals)
            if came and left >= 0.0:
                found = self._best(phase, scale, seed, give_up=1.0 - left / came)
                left -= (1.0 - found.both) * came
                kept = {name: kept[name] + came * getattr(found, name) for name in NAMES}
        return Attainment(*(kept[name] / len(arrivals) for name in NAMES))

    def _best(self, phase: ScenarioPhase, scale: float, seed: int, give_up: float) -> Attainment:
        alone = self.scenario.only(phase)
        runs = (ScenarioProbe(one, alone, max(0.0, give_up)).run(scale, seed) for one in self.chosen[phase.name])
        return max((attainment(run, alone.slo) for run in runs), key=lambda found: found.both)

    @property
    def label(self) -> str:
        return "; ".join(f"{name}: {' or '.join(one.name for one in ones)}" for name, ones in self.chosen.items())


def chosen_for(scenario: Scenario, start: float, effort: SearchEffort, each: Map, progress: Progress) -> PerPhase:
    """The best configurations for each kind of phase, by the ladder on that phase alone."""
    chosen: dict[str, tuple[Contender, ...]] = {}
    for phase in scenario.epochs or scenario.phases:
        if phase.name not in chosen:
            found = statics(scenario.only(phase), replace(effort, finalists=1), each, progress, start)
            near = (1.0 - effort.rung) * found.rate
            bests = (best for best in (found.split, found.colocated) if best.rate >= near)
            chosen[phase.name] = tuple(one for best in bests for one in best.contenders)
    return PerPhase(scenario, chosen)


def per_phase(scenario: Scenario, found: Statics, effort: SearchEffort, each: Map, progress: Progress) -> Job:
    """The job that searches its goodput. Chunk sizes are those of the best static split."""
    chunks = tuple(dict.fromkeys(one.chunk for one in found.split.contenders if one.chunk)) or effort.prompt_chunks[:1]
    knowing = chosen_for(scenario, found.rate, replace(effort, prompt_chunks=chunks), each, progress)
    return Job(PER_PHASE, knowing.label, knowing, scenario.slo, found.rate, effort.seeds, effort.tolerance)
