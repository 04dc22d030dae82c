"""The goodput of a running endpoint: `cluster.scoring.goodput`'s search, with real runs for probes.

A probe is the whole workload, its times stretched to the rate, so that bursts stay bursts; each has prompts of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.load.batches import number_of
from cluster.scoring.figures import Attainment, attainment
from cluster.scoring.goodput import Goodput, Probes, Search, goodput
from cluster.scoring.records import Run
from cluster.workload.arrivals import Workload, WorkloadError
from cluster.workload.changes import at_rate, told_apart
from cluster.workload.load import load_workload
from workers.request import SLO

REACH = 64.0  # rates that are tried lie within so many times the first one, both ways

Drive = Callable[[Workload, int], Run]  # with this seed


@dataclass(frozen=True, slots=True)
class Wanted:
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
        return told_apart(made if rate is None else at_rate(made, rate), number_of(seed, turn))

    @property
    def start(self) -> float:
        """The source's own rate. Raises `WorkloadError` when it has none."""
        made = load_workload(self.source, seed=self.seeds[0])
        if not made.rate:
            raise WorkloadError(f"--goodput begins at the workload's rate, and {self.source} has none; say rate=1")
        return made.rate


def search(wanted: Wanted, drive: Drive, gpus: int, told: Callable[[str], object]) -> Goodput:
    """As many runs as it takes, one after another. `told`: what each probe came to, in words."""
    turn = 0

    def attain(rate: float, seed: int) -> Attainment:
        nonlocal turn
        turn += 1
        attained = attainment(drive(wanted.at(rate, seed, turn), seed), wanted.slo)
        told(f"{rate:.4g} requests/s, seed {seed}: {attained.both:.1%} kept the promise")
        return attained

    start = wanted.start
    bounds = Search(start, start / REACH, start * REACH, wanted.tolerance)
    return goodput(Probes(attain), bounds, wanted.slo, target=wanted.target, seeds=wanted.seeds, gpus=gpus)
