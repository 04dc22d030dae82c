"""The contract of every cost model, whatever its source."""

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.costs import (
    MAX_TOKENS,
    CostModel,
    LayeredCost,
    LinearCost,
    PhasedCost,
    RooflineCost,
    StepCurve,
    TableCost,
)
from workers.engine.estimate import StepEstimate, plan_seconds, prompt_share
from workers.engine.step import Chunk, StepPlan
from workers.profiles.sources import profile_of

pytestmark = pytest.mark.grid

# One of each class and source, and the corners: with pipelines, with every coefficient zero, with a flat curve.
MODELS: dict[str, CostModel] = {
    "linear": LinearCost(),
    "linear, no pairs": LinearCost(prefill_pair_s=0.0),
    "linear, weights": LinearCost(weights_s=0.03),
    "linear, large steps": LinearCost(weights_s=0.03, large_step_tokens=64, large_token_s=0.001),
    "distserve": profile_of("opt-13b", "a100-80gb").cost,
    "distserve TP 2 PP 2": profile_of("opt-66b", "a100-80gb", 2, 2).cost,
    "distserve-vllm": profile_of("opt-66b", "a100-80gb", 2, source="distserve-vllm").cost,
    "splitwise": profile_of("llama-2-70b", "a100-80gb", 8).cost,
    "splitwise PP 2": profile_of("bloom-176b", "h100-80gb", 8, 2).cost,
    "vidur": profile_of("llama-3-8b", "a100-80gb").cost,
    "vidur TP 8 PP 2": profile_of("llama-2-70b", "h100-80gb", 8, 2, source="vidur").cost,
    "roofline": profile_of("qwen2.5-7b", "l4", 2, 2).cost,
    "roofline, a core": profile_of("smollm2-135m", "cpu-core").cost,
}
EVERY = pytest.mark.parametrize("cost", MODELS.values(), ids=MODELS)
TOKENS = st.integers(1, 20_000)
CHUNKS = st.lists(st.tuples(TOKENS, st.integers(0, 20_000)), max_size=4)
BATCH = st.integers(0, 300)
CONTEXT = st.integers(0, 500_000)
LITTLE = 1 + 1e-9  # what sums in another order may differ by


@EVERY
@given(chunks=CHUNKS, batch=BATCH, context=CONTEXT)
def test_a_step_takes_time_and_an_empty_one_the_least(
    cost: CostModel, chunks: list[tuple[int, int]], batch: int, context: int
) -> None:
    seconds = cost.mixed_seconds(chunks, batch, context)
    assert 0.0 < seconds < math.inf
    assert cost.mixed_seconds((), 0, 0) <= seconds * LITTLE


@EVERY
@given(chunks=CHUNKS, batch=BATCH, context=CONTEXT, more=TOKENS, cached=st.integers(0, 20_000), which=st.integers(0, 3))
def test_no_step_gets_shorter_by_more_work(
    cost: CostModel, chunks: list[tuple[int, int]], batch: int, context: int, more: int, cached: int, which: int
) -> None:
    before = cost.mixed_seconds(chunks, batch, context)
    assert before <= cost.mixed_seconds((*chunks, (more, cached)), batch, context) * LITTLE
    if not isinstance(cost, PhasedCost) or batch + 1 != cost.border:  # there one published fit hands over to the other
        assert before <= cost.mixed_seconds(chunks, batch + 1, context) * LITTLE
    assert before <= cost.mixed_seconds(chunks, batch, context + more) * LITTLE
    if chunks:
        tokens, first = chunks.pop(which % len(chunks))
        assert before <= cost.mixed_seconds((*chunks, (tokens + more, first)), batch, context) * LITTLE
        assert before <= cost.mixed_seconds((*chunks, (tokens, first + more)), batch, context) * LITTLE


@EVERY
@given(chunks=CHUNKS, batch=BATCH, context=CONTEXT, cached=st.integers(0, 20_000), share=st.floats(0.01, 4.0))
def test_the_longest_chunk_within_a_time_is_the_inverse_of_the_step(
    cost: CostModel, chunks: list[tuple[int, int]], batch: int, context: int, cached: int, share: float
) -> None:
    seconds = cost.mixed_seconds((*chunks, (1024, cached)), batch, context) * share
    found = cost.prompt_tokens_within(seconds, cached, chunks, batch, context)
    assert 0 <= found < MAX_TOKENS
    if found:
        assert cost.mixed_seconds((*chunks, (found, cached)), batch, context) <= seconds * LITTLE
    # One more does not fit. A closed form and the step round differently: two more surely do not.
    assert cost.mixed_seconds((*chunks, (found + 2, cached)), batch, context) > seconds


@EVERY
@given(tokens=TOKENS, batch=st.integers(1, 300), ratio=st.floats(0.01, 100))
def test_a_slower_machine_is_slower_at_steps_alone(cost: CostModel, tokens: int, batch: int, ratio: float) -> None:
    slower = cost.scaled(ratio).scaled(3.0)
    assert type(slower) is type(cost)
    for args in ((((tokens, 7),), 0, 0), ((), batch, tokens), (((tokens, 0),), batch, tokens)):
        assert slower.mixed_seconds(*args) == pytest.approx(3.0 * ratio * cost.mixed_seconds(*args))
    assert slower.transfer_seconds(12345) == cost.transfer_seconds(12345)
    assert slower.swap_seconds(12345) == cost.swap_seconds(12345)


@EVERY
def test_prefill_and_decode_are_mixed_steps_of_one_kind(cost: CostModel) -> None:
    assert cost.prefill_seconds(300, 20) == cost.mixed_seconds([(300, 20)], 0, 0)
    assert cost.decode_seconds(3, 900) == cost.mixed_seconds(iter(()), 3, 900)
    assert cost.transfer_seconds(2 * 10**9) > cost.transfer_seconds(10**9) > cost.transfer_seconds(0) >= 0.0
    assert cost.swap_seconds(10**9) == pytest.approx(2e9 * cost.swap_byte_s)


@EVERY
def test_no_time_holds_no_prompt_and_free_prompts_are_bounded(cost: CostModel) -> None:
    assert cost.prompt_tokens_within(0.0) == cost.prompt_tokens_within(-1.0) == 0
    free = LinearCost(1.0, 0.0, 0.0, 0.0, 0.0)
    assert free.prompt_tokens_within(1.5) == CostModel.prompt_tokens_within(free, 1.5) == MAX_TOKENS
    assert cost.prompt_tokens_within(math.inf) == MAX_TOKENS


@given(seconds=st.floats(0, 100), cached=st.integers(0, 10**5), pair=st.floats(0, 1e-3), token=st.floats(1e-6, 1))
def test_the_closed_form_of_the_linear_model_is_what_bisection_finds(
    seconds: float, cached: int, pair: float, token: float
) -> None:
    cost = LinearCost(0.01, token, pair)
    closed, found = cost.prompt_tokens_within(seconds, cached), CostModel.prompt_tokens_within(cost, seconds, cached)
    assert abs(closed - found) <= 1 + 1e-9 * found


FIT = (1e-3, 1e-4, 1e-7)
CURVE = StepCurve((1.0, 10.0), (0.1, 0.2))
SOUND: tuple[tuple[type[CostModel], dict[str, Any]], ...] = (
    (LinearCost, {}),
    (PhasedCost, {"prefill": FIT, "small_batch": FIT, "large_batch": FIT, "border": 95}),
    (TableCost, {"prompt": CURVE, "prompts": CURVE, "decode": CURVE, "attention_share": 0.0}),
    (LayeredCost, {"tokens": CURVE, "pair_s": 0.0, "context_s": 0.0}),
    (RooflineCost, dict.fromkeys(("token_s", "pair_s", "row_s", "weights_s", "context_s", "fixed_s"), 1e-3)),
)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(("kind", "fields"), SOUND, ids=[kind.__name__ for kind, _ in SOUND])
def test_times_that_cannot_be_are_refused(kind: type[CostModel], fields: dict[str, Any], value: float) -> None:
    assert kind(**fields).decode_seconds(1, 1) > 0.0
    for name in ("transfer_byte_s", "swap_byte_s", *(each for each in fields if isinstance(fields[each], float))):
        with pytest.raises(ValueError, match=rf"cost\.{name} is {value}"):
            kind(**fields | {name: value})
    for name in (each for each in fields if fields[each] is FIT):
        with pytest.raises(ValueError, match=f"is {value}; it must be 0 or more"):
            kind(**fields | {name: (1.0, value, 1.0)})
    with pytest.raises(ValueError, match="0 or more"):
        kind(**fields).scaled(value)
    with pytest.raises(ValueError, match="rising points"):
        StepCurve((1.0, 2.0), (1.0, value))


def test_text_and_a_mixed_factor_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cost\.step_s is 1 ms"):
        LinearCost(step_s="1 ms")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mixed_factor is 0\.9"):
        TableCost(**SOUND[2][1], mixed_factor=0.9)


@EVERY
def test_a_cost_model_can_be_pickled(cost: CostModel) -> None:
    assert pickle.loads(pickle.dumps(cost)) == cost
    assert hash(cost) == hash(pickle.loads(pickle.dumps(cost)))


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 10)), min_size=1, unique_by=lambda point: point[0]))
def test_a_curve_passes_its_points_and_lifts_those_that_fall(points: list[tuple[int, float]]) -> None:
    curve = StepCurve.rising(points)
    highest = 0.0
    for x, y in sorted(points):
        highest = max(highest, y)
        assert curve(x) == pytest.approx(highest)
    assert curve(min(points)[0] - 5) == curve.ys[0]
    assert curve(curve.xs[-1] + 5) >= curve.ys[-1]
    assert curve.plus(1.0, 2.0)(curve.xs[0]) == pytest.approx(curve.ys[0] + 1.0 + 2.0 * curve.xs[0])


def test_points_of_a_curve_must_rise() -> None:
    for xs, ys in (((), ()), ((1.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ((1.0,), (1.0, 2.0))):
        with pytest.raises(ValueError, match="rising points"):
            StepCurve(xs, ys)
    assert StepCurve((5.0,), (2.0,))(1) == StepCurve((5.0,), (2.0,))(9) == 2.0
    assert StepCurve((0.0, 10.0), (1.0, 2.0))(30) == pytest.approx(4.0)


# ---- in the engine -----------------------------------------------------------------------------------------------


@EVERY
def test_an_estimate_corrects_any_model(cost: CostModel) -> None:
    estimate = StepEstimate(cost)
    plan = StepPlan(1, (Chunk("a/0", tuple(range(200)), 0, tuple(range(13)), None),))
    for _ in range(3):
        estimate.learn(plan, 2.5 * plan_seconds(cost, plan))
    assert plan_seconds(estimate.cost, plan) == pytest.approx(2.5 * plan_seconds(cost, plan))


@EVERY
@given(num_tokens=st.integers(0, 100_000), stages=st.integers(1, 8))
def test_a_prompt_is_cut_into_at_most_as_many_parts_as_stages(cost: CostModel, num_tokens: int, stages: int) -> None:
    share = prompt_share(cost, num_tokens, stages)
    assert -(-num_tokens // stages) <= share <= num_tokens


def test_a_prompt_hidden_behind_the_weights_is_not_cut() -> None:
    """A roofline's few tokens are free beside the weights that every part would read again."""
    roofline: Any = profile_of("llama-2-7b", "h200").cost
    bound_by_memory = replace(roofline, send_token_s=0.0)
    assert prompt_share(bound_by_memory, 64, 4) == 64
    assert prompt_share(bound_by_memory, 8192, 4) < 8192
