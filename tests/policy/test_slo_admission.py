"""Admission by SLO: admitted, queued, refused. A prompt token takes 1 ms, a decode step 10 ms for each sequence."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.policy.policy import Policy, open_policy
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from cluster.spec import ClassSpec
from diptych.view import ClusterView
from tests.policy.views import SIMPLE, changed, spec, view, worker
from workers.costs import CostModel
from workers.request import SLO, Request, SamplingParams

CALM = view(worker("p0"), worker("d0"))
CLASSES = {
    "interactive": ClassSpec(ttft_s=1.0, tpot_s=0.05, max_wait_s=30.0),
    "patient": ClassSpec(ttft_s=1.0, tpot_s=0.05, max_wait_s=30.0, on_miss="queue"),
    "batch": ClassSpec(priority=1, max_wait_s=30.0),
}


class Gate:
    """A policy with admission by SLO, on its own clock."""

    def __init__(self, cost: CostModel | None = SIMPLE, **engine: Any) -> None:
        made = spec("least-loaded", "slo", cost=cost, **engine)
        gateway = replace(made.gateway, classes=CLASSES)
        self.policy: Policy = open_policy(replace(made, gateway=gateway), seed=1)
        self.now_s = 1000.0

    def choose(
        self,
        picture: ClusterView,
        of: str,
        length: int = 100,
        *,
        waited_s: float = 0.0,
        name: str = "r",
        **options: int,
    ) -> Placement | Refusal | Enqueue | None:
        return self.policy.choose(self.ask(picture, of, length, waited_s=waited_s, name=name, **options))

    def ask(
        self, picture: ClusterView, of: str, length: int, *, waited_s: float = 0.0, name: str = "r", **options: int
    ) -> PlacementQuery:
        known = CLASSES[of]
        sampling = SamplingParams(seed=1, max_tokens=options.pop("max_tokens", 9))
        is_queued = bool(options.pop("is_queued", False))
        slo = SLO(known.ttft_s, known.tpot_s, of, known.priority, True)
        asked = Request(name, tuple(range(length)), sampling, slo, **options)  # type: ignore[arg-type]
        return PlacementQuery(picture, asked, now_s=self.now_s, waited_s=waited_s, is_queued=is_queued)

    def send(self, picture: ClusterView, of: str, length: int, name: str) -> None:
        query = self.ask(picture, of, length, name=name)
        answer = self.policy.choose(query)
        assert isinstance(answer, Placement), answer
        self.policy.began(query, answer)


def test_a_request_that_meets_its_slo_is_admitted_with_its_prediction() -> None:
    answer = Gate().choose(changed(CALM, worker("d0", running=4)), "interactive", 500)
    assert isinstance(answer, Placement)
    assert (answer.predicted_ttft_s, answer.predicted_tpot_s) == (pytest.approx(0.5), pytest.approx(0.05))


def test_a_first_token_that_comes_too_late_is_refused_with_the_time_to_wait() -> None:
    gate = Gate()
    gate.send(CALM, "interactive", 800, "a")
    answer = gate.choose(CALM, "interactive", 400)
    assert isinstance(answer, Refusal)
    assert answer.reason == "the first token would take 1.2 to 1.32 s, the SLO is 1 s"
    assert answer.retry_after_s == pytest.approx(0.32)
    gate.now_s += 0.3
    assert isinstance(gate.choose(CALM, "interactive", 400), Placement)
    late = gate.choose(CALM, "interactive", 400, waited_s=0.3)
    assert isinstance(late, Refusal) and late.reason.startswith("after 0.3 s of waiting the first token")
    never = Gate().choose(CALM, "interactive", 1100)
    assert isinstance(never, Refusal) and "even without prompts ahead" in never.reason


def test_a_request_waits_for_a_full_step_if_its_first_token_comes_in_time() -> None:
    gate, full = Gate(), changed(CALM, worker("d0", running=5))
    answer = gate.choose(full, "interactive")
    assert isinstance(answer, Enqueue)
    assert answer.reason == "each token on d0 would take 0.06 s, the SLO is 0.05 s"
    assert answer.need_s == pytest.approx(0.1)
    assert answer.start_s == pytest.approx(9 * 0.05 / 5), "one of five answers of nine tokens ends"
    assert isinstance(gate.choose(full, "interactive", 500, max_tokens=40), Enqueue)
    assert isinstance(gate.choose(full, "interactive", 700, max_tokens=40), Refusal), "it cannot wait for so long"
    assert isinstance(gate.choose(full, "interactive", 700, max_tokens=40, is_queued=True), Enqueue), "a queued one may"
    assert isinstance(gate.choose(full, "interactive", 100, max_tokens=1), Placement), "one token needs no decode"


def test_a_request_waits_for_a_worker_without_free_slots() -> None:
    answer = Gate(max_running=3).choose(changed(CALM, worker("d0", running=2, reserved=1)), "interactive")
    assert isinstance(answer, Enqueue) and answer.reason == "all 3 decode slots of d0 are taken"


def test_no_request_is_admitted_that_would_make_another_miss_its_slo() -> None:
    gate = Gate()
    for number in range(5):
        gate.send(CALM, "interactive", 10, f"r{number}")
    assert isinstance(gate.choose(CALM, "interactive", 10), Enqueue), "records show them, statistics not yet"
    gate.policy.ended("r0/0", gate.now_s)
    assert isinstance(gate.choose(CALM, "interactive", 10), Placement)


def test_decodes_without_an_slo_leave_slots_for_those_with_one() -> None:
    gate = Gate()
    assert isinstance(gate.choose(changed(CALM, worker("d0", running=2)), "batch", 10), Placement)
    answer = gate.choose(changed(CALM, worker("d0", running=3)), "batch", 10)
    assert isinstance(answer, Enqueue)
    assert answer.reason == "each token on d0 would take 0.04 s, the limit for requests without an SLO is 0.0375 s"
    assert isinstance(gate.choose(changed(CALM, worker("d0", running=4)), "interactive", 10), Placement)


def test_a_prompt_without_an_slo_leaves_room_for_those_with_one() -> None:
    gate = Gate()
    assert isinstance(gate.choose(CALM, "batch", 5000), Placement), "the worker is idle"
    gate.send(CALM, "batch", 300, "a")
    assert isinstance(gate.choose(CALM, "batch", 200), Placement)
    answer = gate.choose(CALM, "batch", 300)
    assert isinstance(answer, Enqueue) and answer.reason == "p0 computes prompts for another 0.3 s"
    assert (answer.start_s, answer.need_s) == (pytest.approx(0.1), pytest.approx(0.3))
    assert isinstance(gate.choose(CALM, "interactive", 600), Placement)


def test_a_request_that_may_be_late_waits_like_one_without_an_slo() -> None:
    gate = Gate()
    gate.send(CALM, "interactive", 800, "a")
    assert isinstance(gate.choose(CALM, "patient", 400), Enqueue)
    gate.now_s += 0.8
    gate.policy.prefilled("a/0", gate.now_s)
    assert isinstance(gate.choose(CALM, "patient", 400, waited_s=0.8), Placement), "late, but no prompt is ahead"


def test_after_max_wait_a_request_is_admitted_whatever_the_load_unless_its_class_rejects() -> None:
    gate, full = Gate(), changed(CALM, worker("d0", running=50), worker("p0", queued_tokens=20_000, waiting=9))
    for of, length in (("batch", 100), ("patient", 100)):
        assert isinstance(gate.choose(full, of, length, waited_s=29.9), Enqueue)
        assert isinstance(gate.choose(full, of, length, waited_s=30.0), Placement)
    assert isinstance(gate.choose(full, "interactive", 100, waited_s=30.0), Refusal)


def test_a_tpot_that_no_worker_can_meet_is_refused_at_once() -> None:
    gate = Gate()
    query = gate.ask(CALM, "interactive", 10)
    hasty = replace(query, request=replace(query.request, slo=replace(query.request.slo, tpot_s=0.005)))
    answer = gate.policy.choose(hasty)
    assert isinstance(answer, Refusal) and "even on an empty worker" in answer.reason


def test_a_guessed_cost_is_tried_on_a_worker_that_is_idle_or_has_run_no_step() -> None:
    """The defaults say 1.1 s of this prompt; whoever turned it away would never learn better."""
    gate = Gate(cost=None)
    assert isinstance(gate.choose(CALM, "interactive", 30_000 // 2), Placement)
    for steps, answer in ((0, Placement), (1, Refusal)):
        busy = changed(CALM, worker("p0", waiting=1, queued_tokens=15_000, steps=steps))
        assert isinstance(gate.choose(busy, "interactive", 15_000), answer)


def test_later_attempts_and_parallel_samples_are_always_admitted() -> None:
    gate, full = Gate(), changed(CALM, worker("d0", running=50))
    assert isinstance(gate.choose(full, "interactive", 100, attempt=1), Placement)
    beside = replace(gate.ask(full, "interactive", 100), sibling_worker="p0")
    assert isinstance(gate.policy.choose(beside), Placement)
