"""Chunked batching fills a step exactly up to its TPOT SLO, also where step times are not sums of their parts."""

import pytest

from tests.engine.driving import model_facts
from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.engine import Engine
from workers.engine.estimate import plan_seconds
from workers.engine.step import Chunk, StepPlan, StepResult
from workers.profiles.sources import profile_of
from workers.request import Request, SamplingParams

LONG = 6000  # tokens of a prompt
COSTS = {
    "distserve": profile_of("opt-13b", "a100-80gb").cost,
    "splitwise": profile_of("llama-2-70b", "a100-80gb", 8).cost,
    "vidur": profile_of("llama-3-8b", "a100-80gb").cost,
    "roofline": profile_of("llama-3-8b", "h200").cost,
}


def engine_with(cost: CostModel, tpot_slo_s: float) -> Engine:
    config = EngineConfig(
        block_size=16, kv_blocks=4096, max_batch_tokens=4096, max_running=64, batching="chunked", tpot_slo_s=tpot_slo_s
    )
    return Engine(config, model_facts(context_length=8192), reserved=2, cost=cost)


def add(engine: Engine, name: str, tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=200)
    prompt = tuple(1 + (sum(map(ord, name)) + position) % 900 for position in range(tokens))
    engine.add(Request(name, prompt, sampling, reply_to="test"), 0.0, hold=False)


def compute(engine: Engine, cost: CostModel) -> StepPlan | None:
    """One step that takes what the model says, so that the estimate stays the model."""
    plan = engine.schedule(0.0)
    if plan is None:
        return None
    tokens = tuple(7 if chunk.draw else None for chunk in plan.chunks)
    none, scored = (None,) * len(tokens), ((),) * len(tokens)
    digests = (tuple(b"" for _ in plan.digest_blocks),)
    engine.commit(plan, StepResult(plan.number, tokens, none, digests, plan_seconds(cost, plan), scored), 0.0)
    engine.drain()
    return plan


def is_decode(chunk: Chunk) -> bool:
    return chunk.draw is not None and len(chunk.tokens) == 1


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_the_tpot_slo_bounds_every_step_and_is_used_up(cost: CostModel) -> None:
    decodes = [(50, 50)] * 8
    bound_s = 1.5 * cost.mixed_seconds([(256, 0)], len(decodes), 8 * 60)
    engine = engine_with(cost, bound_s)
    for number, (tokens, _) in enumerate(decodes):
        add(engine, f"d{number}", tokens)
    assert compute(engine, cost) is not None
    add(engine, "long/0", LONG)
    add(engine, "long/1", LONG)
    cut_by_time = 0
    while plan := compute(engine, cost):
        prompts = [chunk for chunk in plan.chunks if not is_decode(chunk)]
        if not prompts:
            break
        assert plan_seconds(cost, plan) <= bound_s * (1 + 1e-9)
        batch = [chunk for chunk in plan.chunks if is_decode(chunk)]
        last = prompts[-1]
        if last.draw is None and sum(len(chunk.tokens) for chunk in plan.chunks) < 4096:
            shapes = [(len(chunk.tokens), chunk.first_position) for chunk in prompts[:-1]]
            longer = (*shapes, (len(last.tokens) + 2, last.first_position))
            assert cost.mixed_seconds(longer, len(batch), sum(chunk.context for chunk in batch)) > bound_s
            cut_by_time += 1
    assert cut_by_time > 3
