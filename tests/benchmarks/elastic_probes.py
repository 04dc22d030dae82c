"""Small workloads of the campaign, and probes that run nothing."""

from collections.abc import Callable

import pytest

from benchmarks.elastic.contenders import Contender
from benchmarks.elastic.probe import Probe
from benchmarks.elastic.scenarios import Absent, Scenario, Size, scenario
from cluster.offline.scoring.figures import Attainment

SMALL = Size(workers=2, stretch=0.1)


def made(name: str, size: Size = SMALL) -> Scenario:
    try:
        return scenario(name, size)
    except Absent as error:
        pytest.skip(str(error))


def pretend(monkeypatch: pytest.MonkeyPatch, most: Callable[[Contender], float]) -> None:
    """A contender holds up to so many requests a second."""

    def attained(probe: Probe, rate: float, seed: int) -> Attainment:
        share = 1.0 if rate <= most(probe.contender) else 0.0
        return Attainment(share, share, share, share)

    monkeypatch.setattr(Probe, "__call__", attained)
