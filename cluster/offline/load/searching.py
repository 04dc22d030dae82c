"""The goodput of a running endpoint: `cluster.offline.scoring.goodput`'s search, with real runs for probes.

A probe is the whole workload, its times stretched to the rate, so that bursts stay bursts, and again with other draws
until it is long enough for a queue to grow; each probe has prompts of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from cluster.offline.scoring.figures import Attainment, attainment
from cluster.offline.scoring.goodput import Goodput, Probes, Search, goodput, probe_span_s
from cluster.offline.scoring.records import Run
from cluster.offline.workload.arrivals import Workload, WorkloadError
from cluster.offline.workload.changes import WorkloadPhase, at_rate, concatenated, run_number, with_distinct_prompts
from cluster.offline.workload.load import load_workload
from workers.request import SLO

MOST_REQUESTS = 5000  # of one probe
SEEDS_APART = 7_919  # so that what a probe adds is not what the next seed begins with
REACH = 64.0  # rates that are tried lie within so many times the first one, both ways

Drive = Callable[[Workload, int], Run]  # with this seed


@dataclass(frozen=True, slots=True)
class GoodputQuery:
    """`target`: the share of requests that keep the promise. `tolerance`: the rate that broke over the one that held,
    less 1, at which a seed's search ends."""

    source: str
    slo: SLO
    target: float
    seeds: tuple[int, ...]
    tolerance: float

    def at(self, rate: float | None, seed: int, turn: int) -> Workload:
        """What is sent at a rate; None: at the source's own."""
        made = load_workload(self.source, seed=seed)
        return with_distinct_prompts(made if rate is None else at_rate(made, rate), run_number(seed, turn))

    def probe(self, rate: float, seed: int, turn: int) -> Workload:
        """The same, as long as a probe must be, but of at most some `MOST_REQUESTS`."""
        once = self.at(rate, seed, turn)
        count = len(once.arrivals)
        tokens = sum(each.output_tokens for each in once.arrivals) / count
        wanted = min(MOST_REQUESTS, ceil(rate * probe_span_s(self.slo, tokens)))
        if count >= wanted:
            return once
        again = [load_workload(self.source, seed=seed + SEEDS_APART * number) for number in range(ceil(wanted / count))]
        parts = [with_distinct_prompts(at_rate(each, rate), number) for number, each in enumerate(again)]
        whole = concatenated([WorkloadPhase(each) for each in parts])
        return with_distinct_prompts(replace(whole, name=once.name), run_number(seed, turn))

    @property
    def start(self) -> float:
        """The source's own rate. Raises `WorkloadError` when it has none."""
        made = load_workload(self.source, seed=self.seeds[0])
        if not made.rate:
            raise WorkloadError(f"--goodput begins at the workload's rate, and {self.source} has none; say rate=1")
        return made.rate


def search(wanted: GoodputQuery, drive: Drive, gpus: int, on_probe: Callable[[str], object]) -> Goodput:
    """As many runs as it takes, one after another. `on_probe` gets a line for each probe."""
    turn = 0

    def attain(rate: float, seed: int) -> Attainment:
        nonlocal turn
        turn += 1
        attained = attainment(drive(wanted.probe(rate, seed, turn), seed), wanted.slo)
        on_probe(f"{rate:.4g} requests/s, seed {seed}: SLO attainment {attained.both:.1%}")
        return attained

    start = wanted.start
    bounds = Search(start, start / REACH, start * REACH, wanted.tolerance)
    return goodput(Probes(attain), bounds, wanted.slo, target=wanted.target, seeds=wanted.seeds, gpus=gpus, unit="rank")
