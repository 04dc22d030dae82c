"""Composition of one worker: the only place that chooses an executor."""

import asyncio
import gc
from dataclasses import replace

from kvtransfer.open import SharedMemory
from workers.config import WorkerConfig
from workers.costs import CostModel, LinearCost
from workers.engine.executor import Executor
from workers.executor.rank_spec import RankLauncher, RankSpec
from workers.executor.simulated import SimulatedModel, simulated_facts
from workers.executor.simulated import open_simulated as open_simulated_executor
from workers.server import ExecutorFactory, WorkerServer

ZERO_COST = replace(LinearCost().scaled(0.0), transfer_latency_s=0.0, transfer_byte_s=0.0)


def build_worker(
    config: WorkerConfig,
    *,
    heartbeat_s: float = 0.25,
    shared: SharedMemory | None = None,
    cost: CostModel | None = None,
    model: SimulatedModel | None = None,
    launcher: RankLauncher | None = None,
) -> WorkerServer:
    """A worker that is still to be loaded: `open` it.

    `shared` joins workers of one process. `cost` is a simulated worker's speed (by default the configuration's, or no
    time at all), `model` its size. `launcher` starts the other ranks of a parallel worker: without one they are tasks
    of this process.
    """
    if config.transfer.host == "auto":
        config = replace(config, transfer=replace(config.transfer, host="127.0.0.1"))

    async def open_torch(config: WorkerConfig, incarnation: str) -> Executor:
        from workers.model.store import resolve

        folder = await asyncio.to_thread(resolve, config.model)
        if config.parallel.world_size == 1:
            from workers.executor.rank_loader import open_solo

            return await open_solo(config, folder, incarnation, shared)
        from workers.executor.gang import open_gang
        from workers.executor.rank_server import RankTasks

        return await open_gang(config, folder, incarnation, launcher or RankTasks(resolve, shared), shared)

    async def open_simulated(config: WorkerConfig, incarnation: str) -> Executor:
        sizes = model or SimulatedModel()
        facts = simulated_facts(config.engine.block_size, sizes)
        speed = cost or config.cost or ZERO_COST
        return open_simulated_executor(config, facts, speed, incarnation, shared, sizes)

    factories: dict[str, ExecutorFactory] = {"torch": open_torch, "simulated": open_simulated}
    return WorkerServer(config, factories[config.executor], heartbeat_s=heartbeat_s)


async def serve_rank(spec: RankSpec) -> None:
    """One rank of a parallel worker, until its leader has gone: what a launcher's process runs."""
    from workers.executor.rank_server import serve_rank as serve_it
    from workers.model.store import resolve

    gc.freeze()  # collections of all that is loaded would delay steps
    await serve_it(spec, resolve)
