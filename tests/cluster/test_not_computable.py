"""A request with non-finite logits fails once, with an explanation, and no other request is affected."""

from dataclasses import replace

import pytest
from msgspec import structs

from cluster.events import NotComputable
from cluster.runtime.interface import WorkerOrder
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, cluster, completed, request, split_spec
from workers.build import build_worker
from workers.config import WorkerConfig
from workers.engine.executor import Executor
from workers.engine.step import StepPlan, StepResult
from workers.server import WorkerServer


def ill_workers(shared: SharedMemory, order: WorkerOrder) -> WorkerServer:
    """Their devices compute NaN for requests of the name "ill" once these have 25 tokens."""
    worker = build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=FAST)
    open_executor = worker._open_executor

    async def opened(config: WorkerConfig, incarnation: str) -> Executor:
        executor = await open_executor(config, incarnation)
        execute = executor.execute

        async def spoiled(plan: StepPlan) -> StepResult:
            result = await execute(plan)
            ill = [chunk.key.startswith("ill") and chunk.context >= 25 for chunk in plan.chunks]
            tokens = [None if each else token for each, token in zip(ill, result.tokens, strict=True)]
            return structs.replace(result, tokens=tuple(tokens))

        executor.execute = spoiled
        return executor

    worker._open_executor = opened
    return worker


@pytest.mark.parametrize("length", [20, 40], ids=["while it decodes", "at its first token"])
async def test_a_request_without_finite_logits_fails_once_and_others_continue(length: int) -> None:
    shared = SharedMemory()
    async with cluster(split_spec(), build=lambda order: ill_workers(shared, order)) as subject:
        ill = request("ill", length, max_tokens=30)
        with pytest.raises(NotComputable, match=r"logits are not finite behind token (25|40)"):
            await subject.run(ill)
        assert completed(await subject.run(replace(ill, id="well"))).attempts == 1
        await subject.settle()
        stats = {name: worker.engine.stats().non_finite for name, worker in subject.workers.items()}
        assert stats == ({"prefill-0": 0, "decode-0": 1} if length == 20 else {"prefill-0": 1, "decode-0": 0})
