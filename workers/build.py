"""Composition of one worker: the only place that chooses an executor."""

import asyncio
from dataclasses import replace

from kvtransfer.layout import KVLayout
from kvtransfer.open import SharedMemory
from workers.config import WorkerConfig
from workers.costs import CostModel
from workers.engine.executor import Executor
from workers.worker import ExecutorFactory, Worker

# The KV of SmolLM2-135M, so that a modelled worker moves as many bytes as the real one.
MODELLED_LAYERS, MODELLED_KV_HEADS, MODELLED_HEAD_DIM = 30, 3, 64
ZERO_COST = CostModel(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def build_worker(
    config: WorkerConfig,
    *,
    heartbeat_s: float = 0.25,
    shared: SharedMemory | None = None,
    cost: CostModel = ZERO_COST,
) -> Worker:
    """A worker that is not started yet. `shared` joins workers of one process, `cost` is a modelled worker's speed."""
    if config.transfer.host == "auto":
        config = replace(config, transfer=replace(config.transfer, host="127.0.0.1"))

    async def open_torch(config: WorkerConfig, incarnation: str) -> Executor:
        from workers.executor.solo import open_solo
        from workers.model.store import resolve

        folder = await asyncio.to_thread(resolve, config.model)
        return await open_solo(config, folder, incarnation, shared)

    async def open_modelled(config: WorkerConfig, incarnation: str) -> Executor:
        from workers.executor.modelled import modelled_facts
        from workers.executor.modelled import open_modelled as open_it

        size = config.engine.block_size
        layout = KVLayout("modelled", MODELLED_LAYERS, MODELLED_KV_HEADS, MODELLED_HEAD_DIM, size)
        return open_it(config, modelled_facts(size, layout=layout), cost, incarnation, shared)

    factories: dict[str, ExecutorFactory] = {"torch": open_torch, "modelled": open_modelled}
    return Worker(config, factories[config.executor], heartbeat_s=heartbeat_s)
