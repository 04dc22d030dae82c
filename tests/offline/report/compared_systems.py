"""Two systems: one split over 4 GPUs with known goodput, one that misses every SLO."""

from dataclasses import replace
from functools import partial

from cluster.offline.report.table import SystemResult
from cluster.offline.scoring.figures import Attainment, figures
from cluster.offline.scoring.goodput import Goodput, Probes, Search, goodput
from tests.offline.scoring.made import refused, split_run
from workers.request import SLO

TEST_SLO = SLO(0.06, 0.02)


def linear(threshold: float, rate: float, seed: int) -> Attainment:
    both = min(1.0, max(0.0, 0.9 + 0.5 * (1.0 - rate / threshold) + 0.01 * seed))
    return Attainment(1.0, both, both, 1.0)


def found(threshold: float, target: float, gpus: int) -> Goodput:
    probes = Probes(partial(linear, threshold))
    return goodput(probes, Search(1.0, 0.5, 64.0), TEST_SLO, target=target, seeds=(0, 1, 2), gpus=gpus)


def systems() -> tuple[SystemResult, SystemResult]:
    ours = split_run()
    theirs = replace(
        ours, system="<cut> & $x$", served=(*ours.served[:3], *(refused(n, 2.0) for n in range(3, 6))), gpus=1
    )
    sweep = tuple(figures(split_run(gap_s=gap_s), TEST_SLO) for gap_s in (0.2, 0.1, 0.05))
    return (
        SystemResult(ours.system, figures(ours, TEST_SLO), (found(8.0, 0.9, 4), found(8.0, 0.99, 4)), sweep, ours),
        SystemResult(theirs.system, figures(theirs, TEST_SLO), (found(0.1, 0.9, 1), found(0.1, 0.99, 1)), run=theirs),
    )
