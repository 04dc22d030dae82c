"""Many simulated workers in one process, each with its own listener, and the runtime that starts them there."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import cast

from benchmarks.control_plane.calls import HOST, RemoteService
from cluster.runtime.interface import WorkerHandle, WorkerOrder, WorkerStub
from cluster.runtime.local import LocalRuntime
from cluster.runtime.rpc_stub import RpcAddress, RpcStub
from workers.build import build_worker
from workers.rpc_server import WorkerRpcServer
from workers.server import WorkerServer
from workers.stats import WorkerInfo


class WorkerHost:
    """The workers of one process."""

    def __init__(self) -> None:
        self._workers: dict[str, tuple[WorkerServer, asyncio.Task[RpcAddress]]] = {}

    async def build(self, order: WorkerOrder) -> None:
        server = build_worker(order.config, heartbeat_s=order.heartbeat_s)
        secret = order.config.secret.encode()
        rpc = WorkerRpcServer(server.incarnation, secret, server.worker)

        async def opened() -> RpcAddress:
            return RpcAddress(HOST, await rpc.start(HOST), secret)

        self._workers[order.config.name] = server, asyncio.ensure_future(opened())

    async def start(self, name: str) -> WorkerInfo:
        worker = await self._workers[name][0].open()
        return await worker.info()

    async def locate(self, name: str) -> RpcAddress:
        return await self._workers[name][1]


@cache
def service(port: int) -> RemoteService:
    """This process's connection to a worker host, for as long as the process lives."""
    return RemoteService(port)


@dataclass(frozen=True, slots=True)
class HostedWorker:
    """A handle to a worker in the host behind `port`; can be sent between processes."""

    name: str
    port: int

    def at(self, incarnation: str) -> WorkerStub:
        locate = partial(service(self.port).call, "locate", self.name)
        return cast(WorkerStub, RpcStub(self.name, incarnation, locate))

    async def start(self) -> WorkerInfo:
        info: WorkerInfo = await service(self.port).call("start", self.name, timeout_s=300.0)
        return info


class HostRuntime(LocalRuntime):
    """Places workers on hosts in turn. They end with their processes."""

    def __init__(self, ports: Sequence[int]) -> None:
        super().__init__()
        self._ports = ports
        self._placed = 0

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        port = self._ports[self._placed % len(self._ports)]
        self._placed += 1
        await service(port).call("build", order)
        return cast(WorkerHandle, HostedWorker(order.config.name, port))

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        """Its process ends it."""
