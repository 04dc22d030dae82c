"""The first verdict: certain as soon as no further run can change it, and what is known before."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

import pytest

from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.estimate import outline
from cluster.offline.plan.race import Race
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import Trial
from cluster.offline.plan.verdict import first_verdict
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import TimeUp
from tests.offline.plan.requests import plan_request

MET, MISSED = Attainment(1.0, 1.0, 1.0, 1.0), Attainment(0.5, 1.0, 0.5, 1.0)


class MadeUpRuns:
    """Instead of processes: each kind of layout holds up to a rate for each GPU. `left`: runs before the time is up."""

    def __init__(self, holds: dict[str, float], left: int = 1000) -> None:
        self.holds = holds
        self.left = left
        self.tried: list[tuple[str, float]] = []

    def each(
        self, work: object, trials: Sequence[Trial], rates: Iterable[float], seeds: Iterable[int]
    ) -> Iterator[Attainment]:
        for trial, rate, _ in zip(trials, rates, seeds, strict=True):
            if len(self.tried) == self.left:
                raise TimeUp
            kind = trial.layout.kind
            self.tried.append((kind, rate / trial.gpus))
            yield MET if rate <= self.holds[kind] * trial.gpus else MISSED


def contenders(request: PlanRequest) -> list[Layout]:
    return outline(request).contenders(request)


def race(request: PlanRequest, runs: MadeUpRuns) -> Race:
    return Race(request, contenders(request), runs.each, width=2)


def caps(request: PlanRequest) -> dict[str, float]:
    """By kind, for each GPU."""
    made = race(request, MadeUpRuns({})).contenders
    return {each.trial.layout.kind: each.cap / each.trial.gpus for each in made}


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
@pytest.mark.parametrize(("winner", "words"), [("colocated", "Do not disaggregate"), ("split", "Disaggregate")])
def test_a_clear_winner_is_found_in_few_runs(winner: str, words: str, seeds: tuple[int, ...]) -> None:
    """With one seed, however many the whole search has."""
    question = plan_request(gpus=2, seeds=seeds)
    holds = {kind: cap * (0.9 if kind == winner else 0.2) for kind, cap in caps(question).items()}
    runs = MadeUpRuns(holds)
    made = race(question, runs)
    made.run()
    assert made.decided and len(runs.tried) <= 8
    found = first_verdict(question, made, 1.0)
    assert found.verdict is not None and found.verdict.words.startswith(words)
    loser = "split" if winner == "colocated" else "colocated"
    assert f"step costs allow {loser} at most" in found.verdict.words or f"{loser} missed" in found.verdict.words
    for option in made.options:
        assert option.goodput.rate <= holds[option.layout.kind] * option.trial.gpus


def test_a_loser_is_tried_no_more() -> None:
    question = plan_request(gpus=2)
    holds = {"colocated": caps(question)["colocated"] * 0.9, "split": 1e-9}
    runs = MadeUpRuns(holds)
    made = race(question, runs)
    made.run()
    assert sum(kind == "split" for kind, _ in runs.tried) == 1
    found = first_verdict(question, made, 1.0)
    assert found.verdict is not None
    assert found.verdict.words.startswith("Do not disaggregate: colocated met the SLO at")


def test_what_is_known_when_the_time_is_up_advises_nothing() -> None:
    question = plan_request(gpus=2)
    ceilings = caps(question)
    made = race(question, MadeUpRuns({"colocated": 0.5 * ceilings["colocated"], "split": ceilings["split"]}, left=2))
    with pytest.raises(TimeUp):
        made.run()
    found = first_verdict(question, made, 50.0)
    assert not found.decided and found.verdict is not None
    assert found.verdict.words.startswith("Not decided yet")


def test_layouts_grow_until_they_serve_the_rate() -> None:
    question = plan_request(gpus=8, rate=2.0)
    smallest = contenders(plan_request(gpus=8, rate=2.0))
    need = {"colocated": 2.0 / (smallest[0].gpus + 1), "split": 2.0 / 8}
    made = race(question, MadeUpRuns(need))
    made.run()
    assert made.decided
    (served, *_) = [option for option in made.options if option.layout.kind == "colocated"]
    assert served.trial.gpus == smallest[0].gpus + 1
    assert served.serves == MET


def test_a_race_probes_several_rates_at_once_on_many_cores() -> None:
    question = plan_request(gpus=2)
    runs = MadeUpRuns({kind: 0.5 * cap for kind, cap in caps(question).items()})
    wide = Race(question, contenders(question), runs.each, width=8)
    wide.run(past=lambda: bool(runs.tried))
    assert len(runs.tried) == 8
    assert len({rate for kind, rate in runs.tried if kind == "split"}) == 4


def test_a_rate_above_what_steps_allow_is_not_tried() -> None:
    question = plan_request(gpus=2, rate=2.0)
    runs = MadeUpRuns({"colocated": inf, "split": inf})
    made = Race(replace(question, rate=1e6), contenders(question), runs.each)
    made.run()
    assert made.decided and not runs.tried and not made.options
