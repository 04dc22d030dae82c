"""Searches the goodput of a running endpoint: each probe of `cluster.offline.scoring.goodput` is a real run.

A probe sends the whole workload with its arrival times scaled to the rate, so bursts stay bursts. It is repeated with
other seeds until it is long enough for a queue to grow. Each probe has its own prompts, so no prefix cache hit carries
over.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from cluster.offline.scoring.figures import Attainment, attainment
from cluster.offline.scoring.goodput import Goodput, Probes, Search, goodput, probe_span_s
from cluster.offline.scoring.records import Run
from cluster.offline.workload.arrivals import Workload, WorkloadError, mean_lengths
from cluster.offline.workload.changes import WorkloadPhase, at_rate, concatenated, run_number, with_distinct_prompts
from cluster.offline.workload.load import load_workload
from workers.request import SLO

MAX_REQUESTS = 5000  # of one probe
SEED_STRIDE = 7_919  # so that repetitions of one seed do not use the next seed's workload
REACH = 64.0  # rates are at most this factor above or below the first one

Drive = Callable[[Workload, int], Run]  # with this seed


@dataclass(frozen=True, slots=True)
class GoodputQuery:
    """`target`: share of requests that must meet the SLO. A seed's search ends when the lowest rate that failed is
    less than 1 + `tolerance` times the highest that passed."""

    source: str
    slo: SLO
    target: float
    seeds: tuple[int, ...]
    tolerance: float

    def at(self, rate: float | None, seed: int, turn: int) -> Workload:
        """The workload at a rate (None: the source's own). `turn` numbers the runs of a seed."""
        made = load_workload(self.source, seed=seed)
        return with_distinct_prompts(made if rate is None else at_rate(made, rate), run_number(seed, turn))

    def probe(self, rate: float, seed: int, turn: int) -> Workload:
        """The same, repeated until it is as long as a probe must be or has about `MAX_REQUESTS`."""
        once = self.at(rate, seed, turn)
        count = len(once.arrivals)
        _, tokens = mean_lengths(once.arrivals)
        wanted = min(MAX_REQUESTS, ceil(rate * probe_span_s(self.slo, tokens)))
        if count >= wanted:
            return once
        again = [load_workload(self.source, seed=seed + SEED_STRIDE * number) for number in range(ceil(wanted / count))]
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
    """Run probes one after another until the goodput is known. `on_probe` gets a line for each."""
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
