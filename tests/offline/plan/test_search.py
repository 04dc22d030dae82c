"""The pruned search finds what measuring every candidate would find."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.plan import search
from cluster.offline.plan.search import Effort, SearchOutcome
from cluster.offline.scoring.figures import Attainment
from workers.request import SLO

EFFORT = Effort(0.9, tolerance=0.02)
TARGETS = SLO(1.0, 1.0)
# A fake Trial's attainment is known without a simulation.
best_of: Any = search.best_of
measure: Any = search.measure


@dataclass(frozen=True)
class Fake:
    """Attains everything up to `holds`, and nothing above."""

    name: str
    holds: float
    weight: float = 1.0
    looks: float = 1.0  # what it is thought to hold, of what it does
    unloaded: float = 1.0
    slo: SLO = TARGETS
    gpus: int = 1
    requests: int = 10

    @property
    def max_rate(self) -> float:
        return 2.0 * self.holds

    @property
    def estimate(self) -> float:
        return self.looks * self.holds

    def __call__(self, rate: float, seed: int) -> Attainment:
        met = 1.0 if rate <= self.holds else 0.0
        return Attainment(met, met, met, 1.0)


fakes = st.lists(
    st.builds(
        Fake,
        st.uuids().map(str),
        holds=st.floats(0.01, 100.0),
        weight=st.sampled_from((1.0, 2.0, 4.0, 8.0)),
        looks=st.floats(0.1, 2.0),
        unloaded=st.sampled_from((0.3, 0.95, 1.0)),
    ),
    min_size=1,
    max_size=12,
)


@given(fakes)
def test_the_pruned_best_is_the_exhaustive_best_to_the_tolerance(candidates: list[Fake]) -> None:
    hopeful = [each for each in candidates if each.unloaded > 0.9]
    exhaustive = max((each.holds / each.weight for each in hopeful), default=0.0)
    ranking = best_of(candidates, EFFORT)
    found = max((each.candidate.holds / each.candidate.weight for each in ranking.best), default=0.0)
    assert exhaustive <= found * (1.0 + EFFORT.tolerance) ** 2
    assert len(ranking.found) == len(candidates)


@given(fakes, st.integers(1, 4))
def test_the_requested_number_is_kept(candidates: list[Fake], keep: int) -> None:
    hopeful = sorted((each.holds / each.weight for each in candidates if each.unloaded > 0.9), reverse=True)
    ranking = best_of(candidates, EFFORT, keep=keep)
    found = sorted((each.candidate.holds / each.candidate.weight for each in ranking.best), reverse=True)
    for wanted, had in zip(hopeful[:keep], found, strict=False):
        assert wanted <= had * (1.0 + EFFORT.tolerance) ** 2
    assert len(found) >= min(keep, len(hopeful))


def test_a_worse_candidate_costs_one_run() -> None:
    ranking = best_of([Fake("good", 10.0), Fake("bad", 5.0, looks=0.5)], EFFORT)
    (bad,) = (each for each in ranking.found if each.candidate.name == "bad")
    assert bad.outcome is SearchOutcome.BEATEN
    assert bad.requests == 10


def test_a_candidate_that_misses_the_slo_alone_is_not_run() -> None:
    ranking = best_of([Fake("slow", 10.0, unloaded=0.5)], EFFORT)
    assert ranking.found[0].outcome is SearchOutcome.HOPELESS
    assert ranking.requests == 0
    assert not ranking.best


def test_a_spent_budget_leaves_the_rest_untried() -> None:
    ranking = best_of([Fake(f"{n}", 10.0 + n) for n in range(20)], Effort(0.9, max_requests=50))
    assert sum(each.outcome is SearchOutcome.UNTRIED for each in ranking.found) >= 10
    assert ranking.best


def test_a_goodput_never_exceeds_what_can_be_sustained() -> None:
    @dataclass(frozen=True)
    class Unbounded(Fake):
        def __call__(self, rate: float, seed: int) -> Attainment:
            return Attainment(1.0, 1.0, 1.0, 1.0)

    found = measure(EFFORT, 0.0, Unbounded("short run", 10.0))
    assert found.goodput is not None
    assert found.goodput.capped
    assert found.rate <= 1.1 * 20.0 + 1e-9
