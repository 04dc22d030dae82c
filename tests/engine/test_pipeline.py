"""Several plans in flight: their sequences, no waits and no starvation, and blocks that outlive their last reader."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.driving import Device, Pipeline, engine, next_token, request, tokens_of
from tests.examples import examples
from workers.config import BATCHING
from workers.costs import LinearCost
from workers.engine.engine import Engine
from workers.engine.estimate import prompt_share
from workers.engine.sequence import Lease
from workers.engine.step import StepPlan
from workers.errors import InvalidRequest, Overloaded
from workers.executor.bubble import WINDOW, BubbleMeter
from workers.request import SLO, Request, SamplingParams, TokensOut

COST = LinearCost(step_s=0.010, prefill_token_s=0.001, prefill_pair_s=0.0, decode_row_s=0.001, decode_context_s=0.0)
FREE_STEPS = LinearCost(step_s=0.0)
DEAR_STEPS = LinearCost(step_s=1.0, prefill_token_s=0.001)


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def shape(plan: StepPlan) -> list[tuple[str, int]]:
    return [(chunk.key.split("/")[0], len(chunk.tokens)) for chunk in plan.chunks]


def decoding(subject: Engine, depth: int, count: int, **fields: Any) -> Pipeline:
    """A pipeline in which `count` sequences have their first token."""
    device = Device()
    flow = Pipeline(subject, depth, device)
    for index in range(count):
        fields.setdefault("max_tokens", 60)
        subject.add(device.know(request(f"d{index}", (1 + index,), **fields)), 0.0, hold=False)
    while sum(isinstance(emitted, TokensOut) for emitted in subject.drain()) < count:
        flow.fill()
        while flow.plans:
            flow.end()
    return flow


# ---- decodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "depth", "groups"),
    [(8, 4, [2, 2, 2, 2]), (9, 4, [3, 2, 2, 2]), (3, 4, [1, 1, 1]), (1, 4, [1]), (5, 2, [3, 2]), (5, 1, [5])],
)
def test_decodes_are_spread_over_one_plan_for_each_stage(count: int, depth: int, groups: list[int]) -> None:
    flow = decoding(engine(max_running=12, depth=depth), depth, count)
    for _ in range(3):
        assert [len(plan.chunks) for plan in flow.fill()] == groups
        while flow.plans:
            flow.end()


def test_a_group_of_decodes_stays_together() -> None:
    flow = decoding(engine(depth=3), 3, 6)
    flow.fill()
    for _ in range(9):
        ended = flow.end()
        (begun,) = flow.fill()
        assert ended is not None and shape(begun) == shape(ended)


@examples(60)
@given(
    depth=st.integers(1, 4),
    answers=st.lists(st.integers(2, 14), min_size=1, max_size=12),
    joins=st.lists(st.integers(0, 9), min_size=12, max_size=12),
)
def test_groups_stay_balanced_while_sequences_join_and_leave(depth: int, answers: list[int], joins: list[int]) -> None:
    """No plan takes more than its part, and every decode that is ready runs while a plan can start."""
    subject = engine(kv_blocks=100, max_running=12, depth=depth, batching="prefill-first")
    flow = Pipeline(subject, depth)
    coming = [(joins[index], request(f"r{index}", (1 + index,), max_tokens=most)) for index, most in enumerate(answers)]
    rounds: Counter[str] = Counter()
    for turn in range(200):
        for made in [made for at, made in coming if at == turn]:
            subject.add(made, float(turn), hold=False)
        flow.fill()
        running = subject.stats().running
        in_flight = {chunk.key for plan in flow.plans for chunk in plan.chunks}
        assert len(flow.plans) == depth or len(in_flight) == running
        for plan in flow.plans:
            assert sum(chunk.first_position > 0 for chunk in plan.chunks) <= -(-12 // depth)
        if (ended := flow.end()) is not None:
            rounds.update(chunk.key for chunk in ended.chunks)
    assert rounds == {made.key: most for (_, made), most in zip(coming, answers, strict=True)}


def test_a_single_decode_continues_when_its_step_has_ended() -> None:
    flow = decoding(engine(depth=4), 4, 1)
    assert [shape(plan) for plan in flow.fill()] == [[("d0", 1)]]
    assert flow.begin() is None  # its next token hangs on the one in flight
    flow.end()
    assert [shape(plan) for plan in flow.fill()] == [[("d0", 1)]]


def test_decodes_that_waited_longest_run_first() -> None:
    """A prompt takes a plan of its own, so more wait than the next plan takes."""
    subject = engine(batching="prefill-first", depth=2)
    flow = decoding(subject, 2, 4)
    assert [shape(plan) for plan in flow.fill()] == [[("d0", 1), ("d1", 1)], [("d2", 1), ("d3", 1)]]
    flow.end()
    flow.fill()
    flow.end()
    subject.add(request("p", prompt(4, 50)), 0.0, hold=False)
    assert shape(flow.fill()[0]) == [("p", 4)]
    flow.end()
    assert [name for name, _ in shape(flow.fill()[0])] == ["d2", "d3", "d0"]


# ---- prompts -----------------------------------------------------------------------------------------------------


def test_chunks_of_one_prompt_are_in_flight_together_and_only_the_last_samples() -> None:
    device, subject = Device(), engine(depth=3, max_batch_tokens=16, cost=DEAR_STEPS)
    flow = Pipeline(subject, 3, device)
    subject.add(device.know(request("a", prompt(40), max_tokens=2)), 0.0, hold=False)
    begun = flow.fill()
    assert [shape(plan) for plan in begun] == [[("a", 16)], [("a", 16)], [("a", 8)]]
    assert [plan.chunks[0].first_position for plan in begun] == [0, 16, 32]
    assert [plan.chunks[0].draw is not None for plan in begun] == [False, False, True]
    assert [shape(plan) for plan in flow.run()][3:] == [[("a", 1)]]
    assert tokens_of(subject.drain(), "a/0") == [next_token("a/0", 40), next_token("a/0", 41)]


@pytest.mark.parametrize(("depth", "sizes"), [(1, [60]), (2, [30, 30]), (4, [15, 15, 15, 15])])
def test_a_lone_prompt_within_the_budget_is_cut_so_that_every_stage_has_a_part(depth: int, sizes: list[int]) -> None:
    subject = engine(depth=depth, max_batch_tokens=64, cost=FREE_STEPS)
    flow = Pipeline(subject, depth)
    subject.add(request("a", prompt(60), max_tokens=1), 0.0, hold=False)
    assert [plan.num_tokens for plan in flow.run()] == sizes


def test_a_prompt_is_not_cut_where_steps_cost_more_than_overlap_saves() -> None:
    subject = engine(depth=4, max_batch_tokens=64, cost=DEAR_STEPS)
    flow = Pipeline(subject, 4)
    subject.add(request("a", prompt(60), max_tokens=1), 0.0, hold=False)
    assert [plan.num_tokens for plan in flow.run()] == [60]


def test_many_prompts_fill_the_budget_of_every_plan() -> None:
    subject = engine(depth=2, max_batch_tokens=16, cost=FREE_STEPS)
    flow = Pipeline(subject, 2)
    for index in range(8):
        subject.add(request(f"r{index}", prompt(8, 1 + 20 * index), max_tokens=1), 0.0, hold=False)
    assert [plan.num_tokens for plan in flow.fill()] == [16, 16]


@examples(100)
@given(num_tokens=st.integers(1, 100_000), stages=st.integers(1, 8), step_s=st.floats(0, 1), token_s=st.floats(0, 0.1))
def test_splitting_a_prompt_is_never_slower_than_running_it_whole(
    num_tokens: int, stages: int, step_s: float, token_s: float
) -> None:
    share = prompt_share(LinearCost(step_s, token_s, prefill_pair_s=0.0), num_tokens, stages)

    def seconds(part: int) -> float:
        count = -(-num_tokens // part)
        return (stages - 1 + count) / stages * (step_s + part * token_s)

    assert share >= 1
    assert stages == 1 or -(-num_tokens // share) <= stages
    # Parts are whole tokens: one token more in each than the exact cut has.
    assert seconds(min(share, num_tokens)) <= seconds(num_tokens) + token_s


@pytest.mark.parametrize("batching", ["static", "orca", "prefill-first"])
def test_orca_spreads_whole_prompts_over_plans(batching: str) -> None:
    subject = engine(batching=batching, depth=4, max_batch_tokens=64, kv_blocks=100, cost=FREE_STEPS)
    flow = Pipeline(subject, 4)
    for name in "abcd":
        subject.add(request(name, prompt(12, ord(name)), max_tokens=2), 0.0, hold=False)
    assert [shape(plan) for plan in flow.fill()] == [[(name, 12)] for name in "abcd"]


def test_static_admits_no_sequence_until_the_batch_has_ended_at_any_depth() -> None:
    subject = engine(batching="static", depth=2)
    flow = Pipeline(subject, 2)
    for name, most in (("short", 2), ("long", 5)):
        subject.add(request(name, prompt(4, ord(name[0])), max_tokens=most), 0.0, hold=False)
    flow.fill()
    subject.add(request("late", prompt(4, 300), max_tokens=1), 0.0, hold=False)
    names = [name for plan in flow.run() for name, _ in shape(plan)]
    assert names.index("late") == len(names) - 1


def test_prefill_only_keeps_the_size_of_its_chunks_and_never_mixes() -> None:
    subject = engine(batching="prefill-only", depth=2, max_batch_tokens=8, cost=FREE_STEPS)
    decoding(subject, 2, 2)
    subject.add(request("a", prompt(20, 50), max_tokens=1), 0.0, hold=False)
    plans = [shape(plan) for plan in Pipeline(subject, 2).run()]
    assert plans[:3] == [[("a", 8)], [("a", 8)], [("a", 4)]]
    assert not any(name == "a" for plan in plans[3:] for name, _ in plan)


def test_a_tpot_slo_limits_prompts_in_the_plans_beside_a_decode() -> None:
    """10 ms for the step, 1 ms for each prompt token: 20 ms leave 10, with or without a decode of one's own."""
    cost = LinearCost(step_s=0.010, prefill_token_s=0.001, prefill_pair_s=0.0, decode_row_s=0.0, decode_context_s=0.0)
    subject = engine(depth=2, max_batch_tokens=64, cost=cost)
    flow = decoding(subject, 2, 1, slo=SLO(tpot_s=0.0205))
    subject.add(request("b", prompt(50, 50), max_tokens=1), 0.0, hold=False)
    assert [shape(plan) for plan in flow.fill()] == [[("d0", 1), ("b", 10)], [("b", 10)]]


def test_scores_of_a_prompt_in_several_chunks_come_in_their_order() -> None:
    subject = engine(depth=3, max_batch_tokens=8)
    flow = Pipeline(subject, 3)
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=1, prompt_logprobs=0)
    subject.add(Request("a", prompt(21), sampling, reply_to="test"), 0.0, hold=False)
    assert len(flow.fill()) == 3
    flow.run()
    (output,) = (each for each in subject.drain() if isinstance(each, TokensOut))
    assert [score.chosen for score in output.prompt_logprobs] == [-float(token) for token in range(2, 22)]


def test_each_block_of_a_held_prompt_is_digested_once_and_the_watermark_follows_the_commits() -> None:
    subject = engine(depth=3, max_batch_tokens=9, cost=DEAR_STEPS)
    flow = Pipeline(subject, 3)
    subject.add(request("a", prompt(31)), 0.0, hold=True)
    flow.fill()
    (lease,) = (each for each in subject.drain() if isinstance(each, Lease))
    ready: list[Any] = []
    key_digests: list[Any] = []
    while (ended := flow.end()) is not None:
        key_digests += ended.digest_blocks
        ready.append(subject.leases.progress("a/0", lease.epoch, 0, 0.0).ready_blocks)
        flow.fill()
    assert key_digests == list(zip(lease.blocks, [4] * 7 + [3], strict=True))
    assert ready == [2, 4, 6, 8]


# ---- endings and blocks ------------------------------------------------------------------------------------------


def test_an_abort_waits_for_the_last_of_several_steps() -> None:
    subject = engine(depth=3, max_batch_tokens=8, cost=DEAR_STEPS)
    flow = Pipeline(subject, 3)
    subject.add(request("a", prompt(40)), 0.0, hold=False)
    flow.fill()
    assert subject.sequences.abort("a/0")
    for _ in range(3):
        assert subject.stats().free_blocks < subject.stats().total_blocks
        assert flow.begin() is None  # nothing more of it is ordered
        flow.end()
    assert subject.stats().free_blocks == subject.stats().total_blocks
    assert not subject.holds("a/0") and not tokens_of(subject.drain(), "a/0")


def test_an_older_decode_waits_for_the_youngest_in_flight_and_then_takes_its_blocks() -> None:
    """The young prompt gets no further chunk once an older sequence needs its blocks."""
    subject = engine(depth=2, kv_blocks=13, max_running=2, max_batch_tokens=3, cost=DEAR_STEPS)  # 11 blocks of 4
    device = Device()
    flow = Pipeline(subject, 2, device)
    subject.add(device.know(request("old", prompt(3), max_tokens=20)), 0.0, hold=False)
    flow.fill()
    flow.end()
    subject.add(device.know(request("young", prompt(36, 100), max_tokens=2)), 1.0, hold=False)
    ordered = 0
    while flow.fill(2.0) or flow.plans:
        if subject.stats().preemptions:
            break
        ended = flow.end(2.0)
        assert ended is not None
        ordered += sum(count for name, count in shape(ended) if name == "young")
    assert subject.stats().preemptions == 1 and 0 < ordered < 36
    flow.run(3.0)
    emitted = subject.drain()
    assert tokens_of(emitted, "old/0") == [next_token("old/0", 3 + n) for n in range(20)]
    assert tokens_of(emitted, "young/0") == [next_token("young/0", 36 + n) for n in range(2)]


def test_recomputed_answers_get_their_share_when_there_is_no_other_prompt() -> None:
    subject, device = engine(depth=2, kv_blocks=10, max_running=2, max_batch_tokens=3), Device()
    flow = Pipeline(subject, 2, device)
    for index in range(2):
        subject.add(device.know(request(f"r{index}", (1 + index,) * 5, max_tokens=20)), float(index), hold=False)
    flow.run(9.0)
    emitted = subject.drain()
    assert subject.stats().preemptions > 0
    for index in range(2):
        assert tokens_of(emitted, f"r{index}/0") == [next_token(f"r{index}/0", 5 + n) for n in range(20)]


def test_a_plan_is_committed_in_its_turn_only() -> None:
    subject = engine(depth=2, max_batch_tokens=8)
    flow = Pipeline(subject, 2)
    subject.add(request("a", prompt(16)), 0.0, hold=False)
    flow.fill()
    flow.plans.rotate()
    with pytest.raises(AssertionError, match="step 2 is not the oldest"):
        flow.end()


@examples(120)
@given(data=st.data(), batching=st.sampled_from(BATCHING), depth=st.integers(1, 4))
def test_every_depth_generates_the_same_tokens(data: st.DataObject, batching: str, depth: int) -> None:
    """Late arrivals, siblings, held prompts, tight pools, any budget, steps computed early or late."""
    device = Device()
    budget = data.draw(st.integers(2, 24))
    subject = engine(
        batching=batching,
        depth=depth,
        kv_blocks=data.draw(st.integers(10, 34)),
        max_running=min(8, budget),
        max_batch_tokens=budget,
        cost=data.draw(st.sampled_from([COST, FREE_STEPS, DEAR_STEPS])),
        tpot_slo_s=data.draw(st.sampled_from([None, 0.02])),
    )
    flow = Pipeline(subject, depth, device)
    lengths: dict[str, tuple[int, int]] = {}
    leases: list[Lease] = []
    emitted: list[object] = []

    def go_on(now_s: float) -> bool:
        begun = flow.begin(now_s) if data.draw(st.booleans()) else None
        for _ in range(data.draw(st.integers(0, 2))):
            flow.compute()
        ended = flow.end(now_s) if begun is None else begun
        emitted.extend(subject.drain())
        return ended is not None

    for index in range(data.draw(st.integers(1, 10))):
        length, most = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 24))
        first, group = 1 + 20 * data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["", "g"]))
        hold = data.draw(st.integers(0, 3)) == 0
        made = device.know(request(f"r{index}", prompt(length, first), max_tokens=most, group=group))
        try:
            subject.add(made, float(index), hold=hold)
        except (InvalidRequest, Overloaded):
            continue
        lengths[made.key] = length, 1 if hold else min(most, subject.max_length - length)
        for _ in range(data.draw(st.integers(0, 4))):
            go_on(float(index))
    for _ in range(1000):
        emitted.extend(subject.drain())
        for lease in [each for each in emitted if isinstance(each, Lease) and each not in leases and each.finished]:
            leases.append(lease)
            subject.leases.release(lease.key, lease.epoch)
        flow.fill(100.0)
        if flow.end(100.0) is None:
            break
    for key, (length, room) in lengths.items():
        outputs = [each for each in emitted if isinstance(each, TokensOut) and each.key == key]
        assert [each.tokens[0] for each in outputs] == [next_token(key, length + n) for n in range(room)]
        assert [each.first_position for each in outputs] == list(range(room))
    assert subject.stats().free_blocks == subject.stats().total_blocks


# ---- the bubble --------------------------------------------------------------------------------------------------


def test_one_plan_at_a_time_leaves_all_stages_but_one_idle() -> None:
    meter = BubbleMeter(4)
    assert meter.share == 0.0
    for number in range(5):
        meter.add(10.0 * number, 10.0 * number + 4.0, (1.0,) * 4)  # the time between plans does not count
    assert meter.share == pytest.approx(3 / 4)


def test_a_full_pipeline_has_the_bubble_of_its_fill_and_drain_only() -> None:
    meter = BubbleMeter(4)
    for number in range(12):
        meter.add(max(0.0, number - 3.0), number + 4.0, (1.0,) * 4)
    assert meter.share == pytest.approx(3 / 15)


def test_only_the_latest_plans_count_and_one_stage_has_no_bubble() -> None:
    meter, single = BubbleMeter(2), BubbleMeter(1)
    meter.add(0.0, 100.0, (0.0, 0.0))
    for number in range(WINDOW):
        meter.add(200.0 + number, 201.0 + number, (1.0, 1.0))
    assert meter.share == 0.0
    single.add(0.0, 2.0, (1.0,))
    assert single.share == 0.0
