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


def _run(job: Job) -> Goodput | str:
    """Or why it could not be found: one contender that breaks does not end a campaign of hours."""
    try:
        return job.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _holds(contender: Contender, scenario: Scenario, rate: float, seed: int) -> bool:
    return Probe(contender, scenario, TARGET)(rate, seed).both >= TARGET


@dataclass(frozen=True, slots=True)
class Best:
    """Those that held on the last rung, and its rate in requests a second."""

    contenders: tuple[Contender, ...]
    rate: float


def pilot(scenario: Scenario, contender: Contender, start: float, effort: Effort) -> Best:
    """Where a ladder begins: one configuration's goodput, roughly."""
    found = Job(SPLIT, Probe(contender, scenario), start, effort.seeds[:1], effort.rough).run()
    return Best((contender,), found.rate or start / REACH)


def ladder(scenario: Scenario, best: Best, others: Sequence[Contender], effort: Effort, each: Map, tell: Tell) -> Best:
    """`others` may take the place of the best so far."""
    alive, rate = [one for one in others if one not in best.contenders], best.rate
    while alive:
        count = len(alive)
        keeps = each(_holds, alive, [scenario] * count, [rate] * count, [effort.seeds[0]] * count)
        alive = [one for one, keep in zip(alive, keeps, strict=True) if keep]
        told = ", ".join(one.name for one in alive[:4]) or "nobody else"
        tell(f"{scenario.name}: of {count}, {len(alive)} hold at {rate:.3g} requests/s: {told}")
        if alive:
            best = Best(tuple(alive[: effort.finalists]), rate)
            rate *= 1.0 + effort.rung
    return best


@dataclass(frozen=True, slots=True)
class Statics:
    """The static configurations that come into question."""

    split: Best
    colocated: Best

    @property
    def rate(self) -> float:
        return max(self.split.rate, self.colocated.rate)


def statics(scenario: Scenario, effort: Effort, each: Map, tell: Tell, start: float | None = None) -> Statics:
    """The best numbers of prefill workers at a middling step; then, beside the best, other steps. And colocated."""
    middle, workers = effort.prompt_chunks[len(effort.prompt_chunks) // 2], scenario.workers
    candidates = tuple(splits(workers, (middle,)))
    best = pilot(scenario, candidates[len(candidates) // 2], start or 0.4 * scenario.rate, effort)
    best = ladder(scenario, best, candidates, effort, each, tell)
    near = {k for one in best.contenders for k in (one.prefills - 1, one.prefills, one.prefills + 1)}
    others = [one for one in splits(workers, effort.prompt_chunks) if one.prefills in near and one not in candidates]
    best = ladder(scenario, best, others, effort, each, tell)
    mixed = tuple(colocated(effort.chunks))
    first = pilot(scenario, mixed[len(mixed) // 2], best.rate, effort)
    return Statics(best, ladder(scenario, first, mixed, effort, each, tell))


@dataclass(frozen=True, slots=True)
class Found:
    """`failed`: contenders that broke, each with the reason."""

    entries: tuple[Entry, ...]
    failed: tuple[str, ...]


def goodputs(scenario: Scenario, found: Statics, effort: Effort, each: Map, tell: Tell) -> Found:
    """Of the finalists, every named system, and ours; of the finalists of one kind only the better is kept."""
    jobs = [
        Job(kind, Probe(one, scenario), best.rate, effort.seeds, effort.tolerance)
        for kind, best in ((SPLIT, found.split), (COLOCATED, found.colocated))
        for one in best.contenders
    ]
    jobs.append(Job(KIND_OURS, Probe(OURS, scenario), found.rate, effort.seeds, effort.tolerance))
    jobs += [
        Job(SYSTEM, Probe(one, scenario), 0.7 * found.rate, effort.few, effort.rough)
        for one in named(found.split.contenders[0].prefills)
        if not effort.systems or one.system in effort.systems
    ]
    made: list[Entry] = []
    failed: list[str] = []
    for job, outcome in zip(jobs, each(_run, jobs), strict=True):
        contender = job.probe.contender
        if isinstance(outcome, str):
            failed.append(f"{contender.name}: {outcome}")
            tell(f"{scenario.name}: {failed[-1]}")
            continue
        made.append(Entry.of(job.kind, contender.name, outcome, contender.prefills))
        tell(f"{scenario.name}: {contender.name} {outcome.per_gpu:.3f} requests/s and GPU")
    kinds = ([one for one in made if one.kind == kind] for kind in (KIND_OURS, SPLIT, COLOCATED))
    best = [max(ones, key=lambda each: each.rate) for ones in kinds if ones]
    return Found((*best, *(one for one in made if one.kind == SYSTEM)), tuple(failed))
