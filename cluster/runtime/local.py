"""Everything in this process, on this event loop: for tests, the simulator, and looking closely.

The same worker and controller code as under Ray; only the process borders are missing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.runtime.interface import ServiceHandle, WorkerGone, WorkerHandle, WorkerOrder
from workers.build import build_worker
from workers.costs import CostModel
from workers.executor.modelled import Modelled
from workers.worker import Worker


def modelled_worker(order: WorkerOrder, cost: CostModel, modelled: Modelled) -> Worker:
    """A worker that takes this cost's seconds, and whose engine knows it."""
    config = replace(order.config, cost=cost)
    return build_worker(config, heartbeat_s=order.heartbeat_s, modelled=modelled)


class LocalService:
    """A service object called directly."""

    def __init__(self, target: Any, build: Callable[[], Any] | None = None) -> None:
        self.target = target
        self.build = build

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        return await getattr(self.target, method)(*args)


class LocalRuntime:
    """Owned by whoever serves. `workers` are the live ones, by name, for tests that look inside."""

    name = "local"

    def __init__(self, build: Callable[[WorkerOrder], Worker] | None = None) -> None:
        self.workers: dict[str, Worker] = {}
        self._build = build or (lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s))

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        worker = self._build(order)
        self.workers[order.config.name] = worker
        return worker

    async def restart_worker(self, order: WorkerOrder, handle: WorkerHandle, incarnation: str) -> WorkerHandle:
        await self.stop_worker(handle, 0.0)
        return await self.start_worker(order)

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        if not isinstance(handle, Worker):
            raise WorkerGone("not a worker of this process")
        await handle.close()
        if self.workers.get(handle.config.name) is handle:
            del self.workers[handle.config.name]

    async def start_service(self, name: str, factory: Callable[..., Any], *args: Any) -> ServiceHandle:
        return LocalService(factory(*args), lambda: factory(*args))

    async def restart_service(self, handle: ServiceHandle) -> ServiceHandle:
        assert isinstance(handle, LocalService) and handle.build is not None
        handle.target = handle.build()
        return handle

    async def stop_service(self, handle: ServiceHandle) -> None:
        """The object goes with its last reference."""

    async def end_all(self) -> None:
        for worker in list(self.workers.values()):
            await self.stop_worker(worker, 0.0)

    async def close(self) -> None:
        await self.end_all()
