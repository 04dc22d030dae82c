"""Composition of one worker: the only place that chooses an executor."""

from workers.config import WorkerConfig
from workers.engine.executor import Executor
from workers.worker import Worker


async def open_executor(config: WorkerConfig, incarnation: str) -> Executor:
    """Load what the configuration names. Errors: `ModelError`."""
    if config.executor == "modelled":
        from workers.executor.modelled import open_modelled

        return await open_modelled(config, incarnation)
    from workers.executor.solo import open_solo

    return await open_solo(config, incarnation)


def build_worker(config: WorkerConfig, *, heartbeat_s: float = 0.25) -> Worker:
    """A worker that is not started yet."""
    return Worker(config, open_executor, heartbeat_s=heartbeat_s)
