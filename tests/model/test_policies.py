"""The whole engine on a real (small, random) model: no policy, copy or preemption changes a token.

Neither do plans in flight: one rank computes them in their order, as the stages of a pipeline do.
"""

import asyncio
from collections import deque
from typing import Any

import pytest

from kvtransfer.open import RESERVED_BLOCKS, SharedMemory
from workers.config import BATCHING, EngineConfig, TransferConfig, WorkerConfig
from workers.engine.engine import Engine
from workers.engine.step import StepPlan, StepResult
from workers.executor.rank_loader import open_solo
from workers.model.folder import ModelFolder
from workers.request import Request, SamplingParams, TokensOut
from workers.stats import WorkerStats

pytestmark = pytest.mark.full

PROMPTS = [tuple(range(5 + 7 * index, 5 + 7 * index + length)) for index, length in enumerate((21, 3, 40, 9, 16))]


async def answers(
    model: ModelFolder, *, siblings: int = 1, depth: int = 1, **engine: Any
) -> tuple[dict[str, list[int]], WorkerStats]:
    """Tokens of every request, joined one step after the other, and what it took.

    A depth of 0: of 1, with one more step ahead.
    """
    ahead, depth = not depth, max(1, depth)
    sizes = EngineConfig(**{"block_size": 8, "kv_blocks": 128, "max_batch_tokens": 64, "threads": 1, **engine})
    config = WorkerConfig("w", "pool", model.name, sizes, transfer=TransferConfig(backends=("memory",)))
    executor = await open_solo(config, model, "w-1", SharedMemory())
    facts = executor.facts
    subject = Engine(sizes, facts, reserved=RESERVED_BLOCKS, depth=depth)
    coming = [
        Request(f"r{index}#{sibling}", prompt, _sampling(index, sibling), reply_to="t", group=f"r{index}")
        for index, prompt in enumerate(PROMPTS)
        for sibling in range(siblings)
    ]
    tokens: dict[str, list[int]] = {each.id: [] for each in coming}
    in_flight: deque[tuple[StepPlan, asyncio.Task[StepResult]]] = deque()
    for number in range(2000):
        if coming:
            subject.add(coming.pop(0), float(number), hold=False)
        while len(in_flight) < depth and (plan := subject.schedule(float(number))) is not None:
            in_flight.append((plan, asyncio.ensure_future(executor.execute(plan))))
        if ahead and (plan := subject.schedule(float(number), ahead=True)) is not None:
            in_flight.append((plan, asyncio.ensure_future(executor.execute(plan))))
        if not in_flight:
            break
        plan, task = in_flight.popleft()
        subject.commit(plan, await task, float(number))
        subject.check()
        for output in subject.drain():
            assert isinstance(output, TokensOut)
            tokens[output.key.split("/")[0]] += output.tokens
    await executor.close()
    return tokens, subject.stats()


def _sampling(index: int, sibling: int) -> SamplingParams:
    temperature = 0.0 if index % 2 else 1.0
    return SamplingParams(temperature=temperature, seed=100 * index + sibling, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("fp8", marks=pytest.mark.full)])
async def test_every_policy_gives_the_same_tokens(small: ModelFolder, dtype: str, batching: str, depth: int) -> None:
    expected, _ = await answers(small, dtype=dtype)
    assert (await answers(small, batching=batching, depth=depth, max_batch_tokens=33, dtype=dtype))[0] == expected
    assert all(len(tokens) == 24 for tokens in expected.values())


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("fp8", marks=pytest.mark.full)])
async def test_preempted_sequences_go_on_with_the_same_tokens(small: ModelFolder, dtype: str, depth: int) -> None:
    expected, calm = await answers(small, dtype=dtype)
    found, stats = await answers(small, depth=depth, kv_blocks=14, dtype=dtype)
    assert found == expected
    assert calm.preemptions == 0 and stats.preemptions > 0


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("fp8", marks=pytest.mark.full)])
async def test_siblings_draw_what_each_would_alone(small: ModelFolder, dtype: str, depth: int) -> None:
    alone, _ = await answers(small, siblings=3, prefix_caching=False, dtype=dtype)
    together, stats = await answers(small, depth=depth, siblings=3, kv_blocks=40, dtype=dtype)
    assert together == alone
    assert stats.free_blocks == stats.total_blocks
