"""SLOs inside an engine: which request gets a decode slot, and which prompt is next."""

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driving import engine, request, step
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.engine.engine import Engine
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence, State
from workers.engine.slo import next_prompt, slot_refusal
from workers.errors import Overloaded
from workers.request import SLO, Request

COST = LinearCost(0.0, 0.001, 0.0, 0.01, 0.0, 0.0, 0.0)  # a prompt token 1 ms, a decode step 10 ms for each sequence
CONTEXT_COST = LinearCost(0.0, 0.001, 0.0, 0.01, 0.001, 0.0, 0.0)  # and a millisecond for each token of context


def enforced(name: str, tpot_s: float | None, **fields: Any) -> Request:
    return request(name, (ord(name[0]),) * 4, slo=SLO(tpot_s=tpot_s, is_enforced=True), **fields)


def test_a_slot_is_granted_while_the_tightest_slo_is_met() -> None:
    subject = engine(cost=COST, kv_blocks=200, max_running=8)
    subject.reservations.reserve(enforced("a", 0.03), 0.0)
    subject.reservations.reserve(enforced("b", None), 0.0)
    subject.reservations.reserve(enforced("c", 1.0), 0.0)
    with pytest.raises(Overloaded, match=r"a step for 4 would take 0.04 s, the TPOT SLO of a/0 is 0.03 s"):
        subject.reservations.reserve(enforced("d", None), 0.0)
    subject.sequences.abort("a/0")
    subject.reservations.reserve(enforced("d", None), 0.0)
    with pytest.raises(Overloaded, match=r"the TPOT SLO of e/0 is 0.03 s"):
        subject.reservations.reserve(enforced("e", 0.03), 0.0)
    subject.check()


def test_an_slo_that_is_not_enforced_limits_no_slots() -> None:
    subject = engine(cost=COST)
    for name in "abc":
        subject.reservations.reserve(request(name, (ord(name),) * 4, slo=SLO(tpot_s=0.01)), 0.0)


def test_an_empty_worker_accepts_any_request_and_an_impossible_slo_is_ignored() -> None:
    subject = engine(cost=COST)
    subject.reservations.reserve(enforced("a", 0.001), 0.0)
    subject.reservations.reserve(enforced("b", 0.001), 0.0)


def test_a_retried_answer_always_gets_a_slot() -> None:
    subject = engine(cost=COST)
    subject.reservations.reserve(enforced("a", 0.015), 0.0)
    for fields in ({}, {"attempt": 1}, {"generated": (1,), "num_moves": 1}):
        with pytest.raises(Overloaded):
            subject.reservations.reserve(enforced("b", None, **fields), 0.0)
    subject.reservations.reserve(enforced("b", None, attempt=1, generated=(1,)), 0.0)


def test_a_prompt_held_for_a_reader_takes_no_slot() -> None:
    subject = engine(cost=COST)
    subject.add(enforced("p", 0.015), 0.0, hold=True)
    step(subject)
    subject.reservations.reserve(enforced("a", 0.015), 0.0)


def test_each_step_in_flight_has_an_equal_part_of_the_decodes() -> None:
    decoding = [Sequence(enforced(name, 0.02), 0.0) for name in "abc"]
    assert slot_refusal(StepEstimate(COST), decoding, enforced("d", 0.02))
    assert not slot_refusal(StepEstimate(COST), decoding, enforced("d", 0.02), depth=2)


def decoding_in(subject: Engine) -> list[Sequence]:
    """Requests that decode here or have a reservation."""
    return [each for each in subject.sequences if each.state in (State.RESERVED, State.RUNNING) and not each.hold]


TPOT_SLOS = st.sampled_from([None, 0.005, 0.02, 0.04, 0.07, 0.2])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TPOT_SLOS, st.integers(1, 40), st.integers(1, 6), st.booleans()), max_size=30))
def test_a_granted_slot_breaks_no_slo(
    asked: list[tuple[float | None, int, int, bool]],
) -> None:
    subject = engine(cost=CONTEXT_COST, kv_blocks=400, max_running=30, max_batch_tokens=64)
    for number, (tpot_s, length, most, comes) in enumerate(asked):
        wanted = request(
            f"r{number}", (number + 1,) * length, slo=SLO(tpot_s=tpot_s, is_enforced=True), max_tokens=most
        )
        before, cost = decoding_in(subject), subject._estimate.cost
        try:
            subject.reservations.reserve(wanted, 0.0)
        except Overloaded:
            assert before, "an empty worker refuses no request"
        else:
            decoding = decoding_in(subject)
            step_s = cost.decode_seconds(len(decoding), sum(len(each.tokens) for each in decoding))
            for each in decoding if len(decoding) > 1 else ():
                kept_s = each.request.slo.tpot_s
                alone_s = cost.decode_seconds(1, each.request.num_tokens)
                assert kept_s is None or kept_s < alone_s or step_s <= kept_s
            if comes:
                subject.reservations.fetched(wanted.key, 0.0)
                subject.reservations.decode(wanted.key, (1,), 0.0)
        step(subject)
    subject.check()


# ---- whose prompt is next ------------------------------------------------------------------------------------------

LINE = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([None, 0.01, 0.05, 0.2, 1.0]), st.integers(1, 60), st.floats(0, 0.5)),
    min_size=1,
    max_size=20,
)


def waiting(line: list[tuple[int, float | None, int, float]]) -> list[Sequence]:
    made = []
    for number, (priority, ttft_s, length, waited_s) in enumerate(line):
        slo = SLO(ttft_s=ttft_s, priority=priority)
        sequence = Sequence(request(f"r{number}", (1,) * length, slo=slo, waited_s=waited_s), number * 0.01)
        sequence.number = number
        made.append(sequence)
    return made


@settings(max_examples=100, deadline=None)
@given(LINE, st.integers(1, 8), st.floats(0.0, 1.0))
def test_the_deadline_order_starts_the_earliest_deadline_that_can_be_met_within_a_window_and_priority(
    line: list[tuple[int, float | None, int, float]], window: int, now_s: float
) -> None:
    config = EngineConfig(prompt_order="deadline", prompt_window=window)
    left = waiting(line)
    while left:
        chosen = next_prompt(left, config, COST.prefill_seconds, now_s)
        able = [each for each in left if each.number < left[0].number + window]
        same = [each for each in able if each.request.slo.priority == min(x.request.slo.priority for x in able)]
        assert chosen in same
        with_slo = [each for each in same if each.request.slo.ttft_s is not None]
        assert chosen in with_slo or not with_slo
        if with_slo:
            in_time = [each for each in with_slo if now_s + seconds_of(each) <= due_s(each)]
            assert due_s(chosen) == min(due_s(each) for each in in_time or with_slo)
        left.remove(chosen)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0205, 0.0505, 0.2005]), st.integers(1, 60)), min_size=1, max_size=5))
def test_the_deadline_order_meets_all_deadlines_if_any_order_does(line: list[tuple[float, int]]) -> None:
    prompts = waiting([(0, ttft_s, length, 0.0) for ttft_s, length in line])

    def all_in_time(order: Iterable[Sequence]) -> bool:
        now_s = prompts[-1].arrival_s
        for each in order:
            now_s += seconds_of(each)
            if now_s > due_s(each):
                return False
        return True

    def by_deadline() -> Iterator[Sequence]:
        left, now_s = list(prompts), prompts[-1].arrival_s
        while left:
            chosen = next_prompt(left, EngineConfig(prompt_order="deadline"), COST.prefill_seconds, now_s)
            left.remove(chosen)
            now_s += seconds_of(chosen)
            yield chosen

    assert all_in_time(by_deadline()) == any(map(all_in_time, permutations(prompts)))


def seconds_of(sequence: Sequence) -> float:
    return COST.prefill_seconds(len(sequence.tokens), 0)


def due_s(sequence: Sequence) -> float:
    request = sequence.request
    assert request.slo.ttft_s is not None
    return sequence.arrival_s - request.waited_s + request.slo.ttft_s


@settings(max_examples=40, deadline=None)
@given(LINE, st.integers(1, 6), st.integers(0, 5))
def test_a_prompt_is_overtaken_by_at_most_one_window(
    line: list[tuple[int, float | None, int, float]], window: int, early: int
) -> None:
    subject = engine(
        cost=COST, prompt_order="deadline", prompt_window=window, kv_blocks=400, max_running=1, max_batch_tokens=64
    )
    number_of, begun, now_s = {}, [], 0.0
    for number, sequence in enumerate(waiting(line)):
        number_of[sequence.key] = number
        subject.add(sequence.request, now_s, hold=False)
        if number % (early + 1) == early:
            begun += one_step(subject, now_s)
        now_s += 0.01
    while more := one_step(subject, now_s):
        begun += more
        now_s += 0.02
    first = list(dict.fromkeys(begun))
    assert set(first) == set(number_of), "no prompt starves"
    for place, key in enumerate(first):
        passed_by = [other for other in first[:place] if number_of[other] > number_of[key]]
        assert all(number_of[other] < number_of[key] + window for other in passed_by)


def one_step(subject: object, now_s: float) -> list[str]:
    plan, _ = step(subject, now_s)  # type: ignore[arg-type]
    return [] if plan is None else [chunk.key for chunk in plan.chunks]
