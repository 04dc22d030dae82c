"""Simulates one contender under a scenario's load: a whole run, or only its SLO attainment."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.elastic.contenders import FRESH, Contender, View, case_of
from benchmarks.elastic.scenarios import Scenario
from cluster.offline.plan.trial import last_deadline_s
from cluster.offline.scoring.figures import Attainment, attainment, most_missed
from cluster.offline.scoring.records import Run
from cluster.offline.sim.cluster import Environment
from cluster.offline.sim.run import RunOptions, simulate


@dataclass(frozen=True, slots=True)
class ScenarioProbe:
    """Attainment by mean rate in requests per second, for `cluster.offline.scoring.goodput`; `run` takes a scale.

    `give_up`: a run ends once it cannot attain this share any more. A plain value, so it can be pickled.
    """

    contender: Contender
    scenario: Scenario
    give_up: float | None = 0.9
    view: View = FRESH

    def __call__(self, rate: float, seed: int) -> Attainment:
        return attainment(self.run(rate / self.scenario.rate, seed), self.scenario.slo)

    def run(self, scale: float, seed: int, *, trace: bool = False) -> Run:
        scenario, case = self.scenario, case_of(self.contender, self.scenario, self.view)
        workload, slo = scenario.draw(scale, seed), scenario.slo
        missed = None if self.give_up is None else most_missed(self.give_up, len(workload.arrivals))
        until_s = last_deadline_s(workload, slo)
        environment = Environment(stale_s=self.view.stale_s)
        options = RunOptions(seed, slo, trace, until_s, missed, self.contender.name, environment)
        with log_errors():
            return simulate(case.spec, case.models, replace(workload, name=scenario.name), options)


@contextmanager
def log_errors() -> Iterator[None]:
    """Suppress warnings: missed and aborted requests are expected in a search."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
