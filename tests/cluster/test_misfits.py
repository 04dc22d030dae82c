"""Workers that could never serve one request together are refused in preflight, not at the first request."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.runtime.interface import WorkerOrder
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, cluster, split_spec
from workers.build import build_worker
from workers.config import WorkerConfig
from workers.engine.executor import Executor, ModelFacts
from workers.errors import ModelError
from workers.executor.simulated import SimulatedModel, open_simulated, simulated_facts
from workers.server import WorkerServer


def building(decode_facts: ModelFacts) -> Callable[[WorkerOrder], WorkerServer]:
    """The decode pool serves `decode_facts`, the prefill pool the usual model."""
    shared = SharedMemory()

    def build(order: WorkerOrder) -> WorkerServer:
        worker = build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=FAST)
        if order.config.pool != "decode":
            return worker

        async def open_other(config: WorkerConfig, incarnation: str) -> Executor:
            return open_simulated(config, decode_facts, FAST, incarnation, shared)

        return WorkerServer(worker.config, open_other, heartbeat_s=order.heartbeat_s)

    return build


async def refusal(decode_facts: ModelFacts) -> str:
    with pytest.raises(ModelError) as refused:
        async with cluster(split_spec(), build=building(decode_facts)):
            pass
    return str(refused.value)


async def test_another_model_is_refused_at_start() -> None:
    facts = simulated_facts(model=SimulatedModel())
    message = await refusal(replace(facts, layout=replace(facts.layout, model="another")))
    assert "model simulated, 30 layers" in message and "model another" in message and "engine.weights" in message


async def test_another_tokenizer_is_refused_at_start() -> None:
    message = await refusal(replace(simulated_facts(model=SimulatedModel()), tokenizer="other"))
    assert "tokenizer" in message and "same model folder" in message


async def test_kv_that_cannot_be_converted_is_refused_at_start() -> None:
    """float32 there, bfloat16 here, and no memory to convert it in."""
    spec = split_spec(backends=("tcp",))
    prefill, decode = spec.pools
    pools = (prefill, replace(decode, engine=replace(decode.engine, dtype="bfloat16")))
    spec = replace(spec, pools=pools, transfer=replace(spec.transfer, staging_bytes=0))
    facts = simulated_facts(model=SimulatedModel(dtype="bfloat16"))
    with pytest.raises(
        ModelError, match=r"cannot exchange KV: the owner.s KV is float32, ours bfloat16, .*use one dtype"
    ):
        async with cluster(spec, build=building(facts)):
            pass
