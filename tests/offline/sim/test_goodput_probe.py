"""A goodput search ends the runs that miss every target, and finds the same rates as without."""

from dataclasses import replace

import pytest

from cluster.offline.scoring.goodput import Goodput
from cluster.offline.scoring.records import Run
from cluster.offline.sim import compare
from cluster.offline.sim.case import Case
from cluster.offline.sim.run import RunOptions
from cluster.offline.workload.arrivals import Workload
from tests.offline.sim.cases import models, split, steady
from workers.request import SLO

SPEC = split()
CASE = Case("split", SPEC, models(SPEC))
OPTIONS = compare.GoodputOptions(
    steady(40, 1.0, prompt=400, output=20), SLO(0.3, 0.05), (0.9, 0.99), (0,), requests=30, tolerance=0.5
)


def searched(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> tuple[tuple[Goodput, ...], int]:
    """The goodputs, and how many requests ended in all runs. `whole`: no run ends early."""
    ended, run_case = 0, compare.run_case

    def run(case: Case, workload: Workload, options: RunOptions) -> Run:
        nonlocal ended
        if whole:
            options = replace(options, max_missed=None)
        made = run_case(case, workload, options)
        ended += sum(len(each.token_s) == each.output_tokens for each in made.served)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(compare, "run_case", run)
        return compare.goodputs(CASE, OPTIONS, map), ended


def test_runs_that_miss_every_target_end_early_and_the_rates_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    early, num_early = searched(monkeypatch, whole=False)
    whole, num_whole = searched(monkeypatch, whole=True)
    assert [each.by_seed for each in early] == [each.by_seed for each in whole]
    assert num_early < num_whole
    for one, other in zip(early, whole, strict=True):
        reached = [(each.rate, each.attained) for each in other.probes if each.attained.both >= 0.9]
        assert reached == [(each.rate, each.attained) for each in one.probes if each.attained.both >= 0.9]
