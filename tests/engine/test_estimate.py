"""How an engine corrects its cost model by the steps that ran."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.costs import CorrectedCost, CostModel, LinearCost
from workers.engine.estimate import StepEstimate, plan_seconds, step_parts
from workers.engine.step import Chunk, Draw, StepPlan
from workers.request import SamplingParams

GIVEN = LinearCost()


def plan(prompts: list[tuple[int, int]], batch: int = 0, context: int = 300) -> StepPlan:
    """Prompts (tokens, computed before), and so many decodes."""
    chunks = [Chunk("p/0", (1,) * count, first, (), None) for count, first in prompts]
    chunks += [Chunk("d/0", (1,), context - 1, (), Draw(SamplingParams(), 0, context)) for _ in range(batch)]
    return StepPlan(1, tuple(chunks))


def truth(decode: float, prompt: float) -> LinearCost:
    """Steps whose two parts take so many times as long as `GIVEN` says."""
    names = ("step_s", "decode_row_s", "decode_context_s"), ("prefill_token_s", "prefill_pair_s")
    ratios = {name: ratio for ratio, each in zip((decode, prompt), names, strict=True) for name in each}
    return replace(GIVEN, **{name: getattr(GIVEN, name) * ratio for name, ratio in ratios.items()})


def learned(plans: list[StepPlan], cost: CostModel, noise: float = 0.0, outliers: float = 0.0) -> StepEstimate:
    """`outliers`: the share of steps that take ten times as long."""
    draw, estimate = Random(0), StepEstimate(GIVEN)
    for each in plans:
        slow = 10.0 if draw.random() < outliers else 1.0
        estimate.learn(each, plan_seconds(cost, each) * slow * draw.lognormvariate(0.0, noise))
    return estimate


def error(estimate: StepEstimate, cost: CostModel, asked: StepPlan) -> float:
    return abs(plan_seconds(estimate.cost, asked) / plan_seconds(cost, asked) - 1.0)


SHORT, LONG = plan([(16, 0)]), plan([(512, 0)])
RATIOS = [(1.0, 0.1), (0.1, 1.0), (5.0, 0.7), (0.2, 0.02), (30.0, 60.0)]


def test_the_reported_ratios_of_a_device_a_thousand_times_as_fast_are_a_cost_model_too() -> None:
    """A scaling policy makes one of them: prompts of an H100 take 0.004 of the default cost per token."""
    estimate = learned([LONG, plan([(64, 0)], 4)] * 40, truth(0.001, 0.001))
    decode, prompt = estimate.ratios
    assert decode == pytest.approx(0.001, rel=0.2) and prompt == pytest.approx(0.001, rel=0.2)
    cost = CorrectedCost.of(GIVEN, decode, prompt)
    assert cost.prompt_tokens_within(cost.prefill_seconds(512) * 1.001) == pytest.approx(512, abs=2)


@pytest.mark.parametrize(("decode", "prompt"), RATIOS)
def test_after_short_prompts_it_knows_long_ones(decode: float, prompt: float) -> None:
    """One ratio for all steps would be off by a factor of up to four."""
    cost = truth(decode, prompt)
    estimate = learned([SHORT, plan([(128, 0)]), plan([(64, 0)])] * 10, cost)
    assert error(estimate, cost, LONG) <= 0.2


@pytest.mark.parametrize(("decode", "prompt"), RATIOS)
def test_many_decodes_say_nothing_about_prompts(decode: float, prompt: float) -> None:
    cost = truth(decode, prompt)
    estimate = learned([LONG, LONG, *[plan([], batch=4)] * 1000], cost)
    assert error(estimate, cost, LONG) <= 0.2
    assert error(estimate, cost, plan([], batch=4)) <= 1e-3


@pytest.mark.parametrize("asked", [SHORT, LONG, plan([], batch=3), plan([(100, 50)], batch=3)])
@pytest.mark.parametrize(("decode", "prompt"), RATIOS)
def test_the_first_step_sets_all_and_steps_alike_stay_known(asked: StepPlan, decode: float, prompt: float) -> None:
    cost = truth(decode, prompt)
    estimate = learned([asked], cost)
    ratio = plan_seconds(cost, asked) / plan_seconds(GIVEN, asked)
    other = plan([(77, 0)], batch=2)
    assert plan_seconds(estimate.cost, other) == pytest.approx(ratio * plan_seconds(GIVEN, other), rel=1e-3)
    assert error(learned([asked] * 500, cost), cost, asked) <= 1e-6
    assert error(learned([asked] * 500, cost, noise=0.2, outliers=0.02), cost, asked) <= 0.35


@pytest.mark.parametrize(("decode", "prompt"), RATIOS)
def test_noise_and_outliers_move_it_little(decode: float, prompt: float) -> None:
    plans = [SHORT, LONG, plan([], batch=4), plan([(128, 0)], batch=2)] * 50
    estimate, cost = learned(plans, truth(decode, prompt), noise=0.2, outliers=0.02), truth(decode, prompt)
    assert max(error(estimate, cost, each) for each in plans) <= 0.35


@given(
    prompts=st.lists(st.tuples(st.integers(1, 600), st.integers(0, 1000)), max_size=2),
    batch=st.integers(0, 8),
    seconds=st.lists(st.floats(1e-7, 1e4), min_size=1, max_size=30),
)
def test_whatever_steps_take_it_stays_positive_and_consistent(
    prompts: list[tuple[int, int]], batch: int, seconds: list[float]
) -> None:
    estimate, step = StepEstimate(GIVEN), plan(prompts, batch)
    for each in seconds:
        estimate.learn(step, each)
        cost = estimate.cost
        expected = plan_seconds(cost, step)
        assert 0.0 < expected < float("inf")
        most = cost.prompt_tokens_within(expected, 10, *step_parts(plan([], batch)))
        assert cost.mixed_seconds([(most, 10)], batch, 300 * batch) <= expected * (1 + 1e-9) or most == 0
        assert cost.mixed_seconds([(most + 1, 10)], batch, 300 * batch) >= expected * (1 - 1e-9)


def test_where_the_cost_model_is_exact_it_stays_as_it_is() -> None:
    estimate = learned([SHORT, LONG, plan([], batch=4)] * 10, GIVEN)
    estimate.learn_decodes(4, 1200, GIVEN.steps_seconds(4, 1200, 50))
    assert estimate.cost is GIVEN
