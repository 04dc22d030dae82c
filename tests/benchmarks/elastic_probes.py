"""Small workloads of the campaign, and fake probes."""

from collections.abc import Callable

import pytest

from benchmarks.elastic.contenders import Contender
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.scenarios import Scenario, ScenarioSize, TraceNotFound, scenario
from cluster.offline.scoring.figures import Attainment

SMALL = ScenarioSize(workers=2, stretch=0.1)


def made(name: str, size: ScenarioSize = SMALL) -> Scenario:
    try:
        return scenario(name, size)
    except TraceNotFound as error:
        pytest.skip(str(error))


def pretend(monkeypatch: pytest.MonkeyPatch, most: Callable[[Contender], float]) -> None:
    """Each contender attains the SLO up to `most(contender)` requests per second."""

    def attained(probe: ScenarioProbe, rate: float, seed: int) -> Attainment:
        share = 1.0 if rate <= most(probe.contender) else 0.0
        return Attainment(share, share, share, share)

    monkeypatch.setattr(ScenarioProbe, "__call__", attained)
