"""A runtime in this process and event loop, for tests, the simulator and debugging.

Runs the same worker and controller code as under Ray.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from cluster.runtime.interface import ServiceHandle, WorkerHandle, WorkerOrder, WorkerStub
from cluster.runtime.runtime_errors import WorkerGone
from workers.build import build_worker
from workers.costs import CostModel
from workers.executor.simulated import SimulatedModel
from workers.server import WorkerServer
from workers.stats import WorkerInfo
from workers.worker import Worker


def simulated_worker(order: WorkerOrder, cost: CostModel, model: SimulatedModel) -> WorkerServer:
    """A worker that computes nothing and takes the times of `cost`, which its engine knows."""
    config = replace(order.config, cost=cost)
    return build_worker(config, heartbeat_s=order.heartbeat_s, model=model)


class LocalService:
    """A service that is called directly."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build
        self.target = build()

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        return await getattr(self.target, method)(*args)


class LocalWorker:
    """A worker in this process. `at` raises `WorkerClosed` until it has loaded."""

    def __init__(self, server: WorkerServer) -> None:
        self.server = server

    def at(self, incarnation: str) -> WorkerStub:
        return cast(WorkerStub, self.server.worker(incarnation))

    async def start(self) -> WorkerInfo:
        worker = await self.server.open()
        return await worker.info()


class LocalRuntime:
    """Owned by the server. `handles`: the running workers, by name."""

    name = "local"

    def __init__(self, build: Callable[[WorkerOrder], WorkerServer] | None = None) -> None:
        self.handles: dict[str, LocalWorker] = {}
        self._build = build or (lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s))

    @property
    def workers(self) -> dict[str, Worker]:
        """The workers that have loaded, for tests."""
        return {name: each.server.worker() for name, each in self.handles.items() if each.server.is_open}

    async def prestart(self, order: WorkerOrder) -> None:
        """Nothing to do: there is no process to wait for."""

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        handle = self.handles[order.config.name] = LocalWorker(self._build(order))
        return cast(WorkerHandle, handle)

    async def restart_worker(self, order: WorkerOrder, handle: WorkerHandle, incarnation: str) -> WorkerHandle:
        await self.stop_worker(handle, 0.0)
        return await self.start_worker(order)

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        if not isinstance(handle, LocalWorker):
            raise WorkerGone("not a worker of this process")
        await handle.server.close()
        name = handle.server.config.name
        if self.handles.get(name) is handle:
            del self.handles[name]

    async def start_service(self, name: str, factory: Callable[..., Any], *args: Any) -> ServiceHandle:
        return LocalService(lambda: factory(*args))

    async def restart_service(self, handle: ServiceHandle) -> ServiceHandle:
        assert isinstance(handle, LocalService)
        handle.target = handle.build()
        return handle

    async def stop_service(self, handle: ServiceHandle) -> None:
        """Nothing to do: the object is garbage-collected."""

    async def end_all(self) -> None:
        for handle in list(self.handles.values()):
            await self.stop_worker(cast(WorkerHandle, handle), 0.0)

    async def close(self) -> None:
        await self.end_all()
