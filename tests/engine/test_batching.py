"""The defining property of each batching policy, in the plans it makes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driving import Device, engine, next_token, request, result, run_to_end, step, tokens_of
from workers.config import BATCHING, EngineConfig
from workers.costs import LinearCost, StepCurve, TableCost
from workers.engine.batching import Adaptive
from workers.engine.engine import Engine
from workers.engine.estimate import plan_seconds
from workers.engine.step import StepPlan
from workers.errors import InvalidRequest, Overloaded
from workers.request import SLO, TokensOut

Shape = list[tuple[str, int]]


def shape(plan: StepPlan | None) -> Shape:
    """(request, number of tokens) of each chunk."""
    return [] if plan is None else [(chunk.key.split("/")[0], len(chunk.tokens)) for chunk in plan.chunks]


def plans(subject: Engine) -> list[Shape]:
    made = []
    while (plan := step(subject)[0]) is not None:
        made.append(shape(plan))
    return made


class TimedEngine:
    """An engine whose steps take the time of its cost model."""

    def __init__(self, cost: LinearCost, now_s: float) -> None:
        self.engine = engine(batching="adaptive", cost=cost, max_batch_tokens=64)
        self.now_s = now_s
        self._cost = cost

    def run(self) -> Shape:
        plan = self.engine.schedule(self.now_s)
        assert plan is not None
        seconds = plan_seconds(self._cost, plan)
        self.now_s += seconds
        self.engine.commit(plan, result(plan, seconds), self.now_s)
        return shape(plan)


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_every_policy_has_its_name() -> None:
    for name in BATCHING:
        subject = engine(batching=name)
        subject.add(request("a", prompt(5), max_tokens=2), 0.0, hold=False)
        assert plans(subject) == [[("a", 5)], [("a", 1)]]
    with pytest.raises(ValueError, match=r"engine.batching 'sjf' is not one of chunked, static"):
        EngineConfig(batching="sjf")


def test_static_admits_no_sequence_until_the_batch_has_ended() -> None:
    subject = engine(batching="static")
    subject.add(request("short", prompt(4), max_tokens=2), 0.0, hold=False)
    subject.add(request("long", prompt(4, 50), max_tokens=4), 0.0, hold=False)
    first = shape(step(subject)[0])
    subject.add(request("late", prompt(4, 90), max_tokens=2), 0.0, hold=False)
    assert [first, *plans(subject)] == [
        [("short", 4), ("long", 4)],
        [("short", 1), ("long", 1)],
        [("long", 1)],  # the early finisher's place stays empty
        [("long", 1)],
        [("late", 4)],
        [("late", 1)],
    ]


def test_orca_lets_prompts_join_and_answers_leave_at_every_iteration() -> None:
    subject = engine(batching="orca")
    subject.add(request("a", prompt(4), max_tokens=3), 0.0, hold=False)
    step(subject)
    subject.add(request("b", prompt(12, 50), max_tokens=2), 0.0, hold=False)
    assert plans(subject) == [[("a", 1), ("b", 12)], [("a", 1), ("b", 1)]]


@pytest.mark.parametrize("batching", ["orca", "static"])
def test_reserving_whole_answers_avoids_preemption(batching: str) -> None:
    subject = engine(batching=batching, kv_blocks=12)  # 10 usable blocks of 4
    for name in "abc":
        subject.add(request(name, prompt(4, ord(name)), max_tokens=12), 0.0, hold=False)  # 4 blocks each in the end
    step(subject)
    assert subject.stats().running == 2 and subject.stats().waiting == 1
    emitted = run_to_end(subject)
    assert subject.stats().preemptions == 0
    assert len(tokens_of(emitted, "c/0")) == 12


def test_blocks_on_demand_admit_more_sequences_than_reserved_answers() -> None:
    subject = engine(kv_blocks=12)
    for name in "abc":
        subject.add(request(name, prompt(4, ord(name)), max_tokens=12), 0.0, hold=False)
    step(subject)
    assert subject.stats().running == 3


def test_prefill_first_pauses_decodes_for_whole_prompts() -> None:
    subject = engine(batching="prefill-first")
    subject.add(request("a", prompt(4), max_tokens=3), 0.0, hold=False)
    step(subject)
    subject.add(request("b", prompt(12, 50), max_tokens=2), 0.0, hold=False)
    subject.add(request("c", prompt(9, 70), max_tokens=2), 0.0, hold=False)
    assert plans(subject) == [[("b", 12)], [("c", 9)], [("a", 1), ("b", 1), ("c", 1)], [("a", 1)]]


@pytest.mark.parametrize("batching", ["static", "orca", "prefill-first"])
def test_policies_without_chunks_run_a_prompt_longer_than_the_budget_whole(batching: str) -> None:
    subject = engine(batching=batching, max_batch_tokens=16)
    subject.add(request("a", prompt(40), max_tokens=2), 0.0, hold=False)
    assert plans(subject)[0] == [("a", 40)]


def test_chunked_computes_all_decodes_and_hits_the_budget_exactly() -> None:
    subject = engine(max_batch_tokens=8)
    subject.add(request("a", prompt(3), max_tokens=6), 0.0, hold=False)
    step(subject)
    subject.add(request("b", prompt(10, 50), max_tokens=2), 0.0, hold=False)
    subject.add(request("c", prompt(9, 70), max_tokens=2), 0.0, hold=False)
    assert plans(subject)[:3] == [
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 3), ("c", 4)],  # even a short prompt is cut so that the step is full
        [("a", 1), ("b", 1), ("c", 5)],
    ]


COST = LinearCost(step_s=0.010, prefill_token_s=0.001, prefill_pair_s=0.0, decode_row_s=0.001, decode_context_s=0.0)


def test_chunked_limits_chunks_by_the_tpot_slo() -> None:
    """10 ms for the step, 1 ms for the decode and for each prompt token: an SLO of 20 ms leaves 9 tokens."""
    subject = engine(max_batch_tokens=64, tpot_slo_s=0.020, cost=COST)
    _decoding(subject)
    subject.add(request("b", prompt(40, 50), max_tokens=2), 0.0, hold=False)
    assert shape(subject.schedule(0.0)) == [("a", 1), ("b", 9)]


def test_the_tightest_slo_of_the_decodes_counts() -> None:
    subject = engine(max_batch_tokens=64, cost=COST)
    _decoding(subject, slo=SLO(tpot_s=0.016))
    subject.add(request("b", prompt(40, 50), max_tokens=2), 0.0, hold=False)
    assert shape(subject.schedule(0.0)) == [("a", 1), ("b", 5)]


def test_prompts_advance_under_an_slo_that_cannot_be_met() -> None:
    subject = engine(max_batch_tokens=64, tpot_slo_s=0.001, cost=COST)
    _decoding(subject)
    subject.add(request("b", prompt(40, 50), max_tokens=2), 0.0, hold=False)
    assert shape(subject.schedule(0.0)) == [("a", 1), ("b", 11)]  # twice the 11 ms of the decode alone


def test_the_tpot_slo_limits_nothing_without_decodes() -> None:
    subject = engine(max_batch_tokens=64, tpot_slo_s=0.001, cost=COST)
    subject.add(request("b", prompt(40, 50), max_tokens=2), 0.0, hold=False)
    assert shape(subject.schedule(0.0)) == [("b", 40)]


def test_the_estimate_learns_how_fast_the_machine_is() -> None:
    """Steps that take twice the predicted time leave half the tokens for prompts."""
    subject = engine(max_batch_tokens=64, tpot_slo_s=0.040, cost=COST)
    _decoding(subject, speed=2.0)
    subject.add(request("b", prompt(40, 50), max_tokens=2), 0.0, hold=False)
    assert shape(subject.schedule(0.0)) == [("a", 1), ("b", 9)]  # as 20 ms at the speed of the model


def _decoding(subject: Engine, speed: float = 1.0, slo: SLO | None = None) -> None:
    """Bring `a` to its first token, every step as long as the model says times `speed`."""
    subject.add(request("a", prompt(3), max_tokens=6, slo=slo or SLO()), 0.0, hold=False)
    plan = subject.schedule(0.0)
    assert plan is not None
    subject.commit(plan, result(plan, speed * plan_seconds(COST, plan)), 0.0)


def test_prefill_only_packs_chunks_of_one_size_and_never_mixes() -> None:
    subject = engine(batching="prefill-only", max_batch_tokens=8)
    subject.add(request("a", prompt(3), max_tokens=3), 0.0, hold=False)
    step(subject)
    subject.add(request("b", prompt(13, 50), max_tokens=2), 0.0, hold=False)
    subject.add(request("c", prompt(11, 70), max_tokens=2), 0.0, hold=False)
    assert plans(subject) == [
        [("b", 8)],
        [("b", 5), ("c", 3)],
        [("c", 8)],
        [("a", 1), ("b", 1), ("c", 1)],
        [("a", 1)],
    ]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), batching=st.sampled_from(BATCHING), order=st.sampled_from(["fcfs", "deadline"]))
def test_every_policy_generates_the_same_tokens(data: st.DataObject, batching: str, order: str) -> None:
    """Late arrivals, tight pools, any budget: no request starves, and no answer depends on the other requests."""
    device = Device()
    subject = engine(
        batching=batching,
        prompt_order=order,
        kv_blocks=data.draw(st.integers(10, 34)),
        max_batch_tokens=data.draw(st.integers(8, 24)),
        cost=COST,
        tpot_slo_s=data.draw(st.sampled_from([None, 0.02])),
    )
    lengths, emitted = {}, []
    for index in range(data.draw(st.integers(1, 12))):
        length, most = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12))
        made = device.know(request(f"r{index}", prompt(length, 1 + 20 * data.draw(st.integers(0, 2))), max_tokens=most))
        try:
            subject.add(made, float(index), hold=False)
        except (InvalidRequest, Overloaded):
            continue
        lengths[made.key] = length, most
        for _ in range(data.draw(st.integers(0, 3))):
            emitted += step(subject, float(index), device)[1]
    for _ in range(600):
        plan, more = step(subject, 100.0, device)
        emitted += more
        if plan is None:
            break
    for key, (length, most) in lengths.items():
        outputs = [each for each in emitted if isinstance(each, TokensOut) and each.key == key]
        room = min(most, subject.max_length - length)
        assert [each.tokens[0] for each in outputs] == [next_token(key, length + n) for n in range(room)]
        assert [each.finish is not None for each in outputs] == [False] * (room - 1) + [True]
    assert subject.stats().free_blocks == subject.stats().total_blocks


def test_adaptive_cuts_a_prompt_that_fits_only_beside_decodes() -> None:
    subject = engine(batching="adaptive", max_batch_tokens=16)
    for name, length in (("a", 10), ("b", 9), ("c", 6)):
        subject.add(request(name, prompt(length, ord(name)), max_tokens=2), 0.0, hold=False)
    assert shape(step(subject)[0]) == [("a", 10)]  # not also the beginning of b
    assert shape(step(subject)[0]) == [("a", 1), ("b", 9), ("c", 6)]  # from now on as chunked
    long = engine(batching="adaptive", max_batch_tokens=16)
    long.add(request("d", prompt(40), max_tokens=2), 0.0, hold=False)
    assert [plan[0][1] for plan in plans(long)] == [16, 16, 8, 1]


def test_adaptive_computes_prompts_together_only_where_a_step_with_both_is_expected_to_be_shorter_than_two() -> None:
    one, two = StepCurve((0.0, 16.0), (0.01, 0.02)), StepCurve((0.0, 8.0, 16.0), (0.01, 0.02, 0.05))
    cost = TableCost(prompt=one, prompts=two, decode=one, attention_share=0.0)
    for lengths, expected in (((4, 4), [[("a", 4), ("b", 4)]]), ((6, 8), [[("a", 6)], [("b", 8)]])):
        subject = engine(batching="adaptive", max_batch_tokens=16, cost=cost)
        for name, length in zip("ab", lengths, strict=True):
            subject.add(request(name, prompt(length, ord(name)), max_tokens=1), 0.0, hold=False)
        assert plans(subject) == expected


def test_adaptive_spends_the_slack_of_streams_on_prompts_and_delays_none_beyond_its_slo() -> None:
    slo_s, token_s = 0.01, 0.001
    cost = LinearCost(step_s=0.004, prefill_token_s=token_s, prefill_pair_s=0.0, decode_row_s=0.0, decode_context_s=0.0)
    timed = TimedEngine(cost, 0.0)
    subject, run = timed.engine, timed.run

    subject.add(request("d", prompt(6), max_tokens=100, slo=SLO(tpot_s=slo_s)), timed.now_s, hold=False)
    run()
    began_s = timed.now_s
    subject.add(request("e", prompt(10, 40), max_tokens=1), timed.now_s, hold=False)
    assert [run() for _ in range(2)] == [[("d", 1), ("e", 5)]] * 2, "no stream has slack"
    for _ in range(10):
        run()
    subject.add(request("f", prompt(60, 60), max_tokens=1), timed.now_s, hold=False)
    sizes: list[int] = []
    for count in range(13, 40):
        before_s, sizes = timed.now_s, [*sizes, dict(run()).get("f", 0)]
        assert timed.now_s - before_s <= Adaptive.PAUSE * slo_s + 1e-9
        assert timed.now_s <= began_s + count * slo_s
    assert sizes[0] == round((Adaptive.PAUSE * slo_s - 0.004) / token_s) and sum(sizes) == 60


@pytest.mark.parametrize(
    ("late_s", "arrivals_before", "with_prompt"),
    [(0.05, 0, [False, True, True]), (0.09, 0, [False, False, True]), (0.09, 20, [True, True, True])],
)
def test_adaptive_pauses_prompts_for_a_stream_that_arrived_during_a_step_while_few_arrive(
    late_s: float, arrivals_before: int, with_prompt: list[bool]
) -> None:
    """A decode step takes 40 ms: beyond 16 arrivals in 10 s, two such steps for each are 0.13 of the time."""
    cost = LinearCost(step_s=0.04, prefill_token_s=0.01, prefill_pair_s=0.0, decode_row_s=0.0, decode_context_s=0.0)
    slo = SLO(tpot_s=0.1)
    timed = TimedEngine(cost, 1.0)
    subject, run = timed.engine, timed.run

    def arrive(name: str, max_tokens: int, at_s: float) -> None:
        sequence = request(name, prompt(5, 60), max_tokens=max_tokens, slo=slo)
        subject.reservations.reserve(sequence, at_s)
        subject.reservations.fetched(sequence.key, at_s)
        subject.reservations.decode(sequence.key, [7], at_s)

    for number in range(arrivals_before):
        arrive(f"early-{number}", 2, timed.now_s - 0.001)
        run()
    arrive("new", 9, timed.now_s - late_s)  # it waited for the end of a step
    subject.add(request("prompt", prompt(30), max_tokens=1), timed.now_s, hold=False)
    steps = [dict(run()) for _ in range(3)]
    assert all("new" in each for each in steps)
    assert ["prompt" in each for each in steps] == with_prompt
