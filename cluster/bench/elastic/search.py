"""Who sustains how much: the best of the static configurations by a ladder, and goodput by bisection.

The ladder: a middling configuration's goodput is searched first; all others are tried at that rate, who holds is tried
a rung higher, and so on until nobody does. A configuration that is not the best is thus given up after one run, which
is cut as soon as it cannot attain the target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.bench.elastic.contenders import CHUNKS, OURS, PROMPT_CHUNKS, Contender, case_of, colocated, named, splits
from cluster.bench.elastic.probe import Probe
from cluster.bench.elastic.record import COLOCATED, SPLIT, SYSTEM, Entry
from cluster.bench.elastic.record import OURS as KIND_OURS
from cluster.bench.elastic.scenarios import Scenario
from cluster.scoring.goodput import Goodput, Map, Probes, Search, goodput

TARGET = 0.9
REACH = 16.0  # nothing below 1/16 or above 16 times the start is tried
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """`seeds` for ours, the best static configurations and the oracle, `few` for the named systems.

    `rung`: of the ladder, relative. `finalists`: so many that held on the last rung are searched with all seeds.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    few: tuple[int, ...] = (0,)
    tolerance: float = 0.05
    rough: float = 0.1  # tolerance for named systems
    rung: float = 0.05
    finalists: int = 2
    systems: tuple[str, ...] = ()  # none: all
    prompt_chunks: tuple[int, ...] = PROMPT_CHUNKS
    chunks: tuple[int, ...] = CHUNKS


@dataclass(frozen=True, slots=True)
class Job:
    """A goodput to search; a value, so that it can go to another process."""

    kind: str
    probe: Probe
    start: float
    seeds: tuple[int, ...]
    tolerance: float

    def run(self) -> Goodput:
        scenario = self.probe.scenario
        search = Search(self.start, self.start / REACH, self.start * REACH, self.tolerance)
        gpus = case_of(self.probe.contender, scenario).gpus
        return goodput(Probes(self.probe), search, scenario.slo, target=TARGET, seeds=self.seeds, gpus=gpus)


def _run(job: Job) -> Goodput:
    return job.run()


def _holds(contender: Contender, scenario: Scenario, rate: float, seed: int) -> bool:
    return Probe(contender, scenario, TARGET)(rate, seed).both >= TARGET


def ladder(
    scenario: Scenario, candidates: Sequence[Contender], effort: Effort, each: Map, start: float
) -> tuple[tuple[Contender, ...], float]:
    """Those that held on the last rung, and its rate. `start`: where the first search begins, in requests a second."""
    seed = effort.seeds[0]
    pilot = candidates[len(candidates) // 2]
    held = Job(SPLIT, Probe(pilot, scenario), start, (seed,), effort.rough).run().rate
    rate = held or start / REACH
    alive, last = [pilot], [each for each in candidates if each != pilot]
    while last:
        keeps = each(_holds, last, [scenario] * len(last), [rate] * len(last), [seed] * len(last))
        kept = [one for one, keep in zip(last, keeps, strict=True) if keep]
        if not kept:
            break
        alive, held, last = kept, rate, kept
        rate *= 1.0 + effort.rung
    return tuple(alive[: effort.finalists]), held or rate


@dataclass(frozen=True, slots=True)
class Statics:
    """The static configurations that come into question: the best splits and the best colocated ones, with a rate."""

    split: tuple[Contender, ...]
    colocated: tuple[Contender, ...]
    split_rate: float
    colocated_rate: float

    @property
    def rate(self) -> float:
        return max(self.split_rate, self.colocated_rate)


def statics(scenario: Scenario, effort: Effort, each: Map, start: float | None = None) -> Statics:
    rate = start or 0.4 * scenario.rate
    split, split_rate = ladder(scenario, tuple(splits(scenario.workers, effort.prompt_chunks)), effort, each, rate)
    mixed, mixed_rate = ladder(scenario, tuple(colocated(effort.chunks)), effort, each, split_rate)
    return Statics(split, mixed, split_rate, mixed_rate)


def entries(scenario: Scenario, found: Statics, effort: Effort, each: Map, tell: Tell) -> tuple[Entry, ...]:
    """Goodputs of the finalists, every named system, and ours; of the finalists of one kind only the better."""
    jobs = [Job(SPLIT, Probe(one, scenario), found.split_rate, effort.seeds, effort.tolerance) for one in found.split]
    jobs += [
        Job(COLOCATED, Probe(one, scenario), found.colocated_rate, effort.seeds, effort.tolerance)
        for one in found.colocated
    ]
    jobs.append(Job(KIND_OURS, Probe(OURS, scenario), found.rate, effort.seeds, effort.tolerance))
    jobs += [
        Job(SYSTEM, Probe(one, scenario), 0.7 * found.rate, effort.few, effort.rough)
        for one in named(found.split[0].prefills)
        if not effort.systems or one.system in effort.systems
    ]
    made = []
    for job, goodput_found in zip(jobs, each(_run, jobs), strict=True):
        contender = job.probe.contender
        made.append(Entry.of(job.kind, contender.name, goodput_found, contender.prefills))
        tell(f"{scenario.name}: {contender.name} {goodput_found.per_gpu:.3f} requests/s and GPU")
    best = [max((one for one in made if one.kind == kind), key=_rate) for kind in (SPLIT, COLOCATED)]
    return (*(one for one in made if one.kind == KIND_OURS), *best, *(one for one in made if one.kind == SYSTEM))


def _rate(entry: Entry) -> float:
    return entry.rate
