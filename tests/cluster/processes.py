"""A whole cluster in virtual time whose services and workers behave like processes: they freeze, and starts fail."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

from cluster.control.controller import Controller
from cluster.frontend.context import GatewayContext
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import Environment, PoolModel, SimRuntime, virtual
from cluster.runtime.interface import ServiceHandle, WorkerHandle, WorkerOrder
from cluster.runtime.local import LocalService, LocalWorker
from cluster.runtime.runtime_errors import NoAnswer, WorkerGone
from cluster.serving import Serving, serve
from cluster.spec import ClusterSpec
from tests.cluster.local import FAST, split_spec


def _raising(error: Exception) -> Any:
    async def start() -> None:
        raise error

    return start


class Service(LocalService):
    """A service in a process: it can be frozen, and calls to it have deadlines, as under Ray."""

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__(build)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.fault: Exception | None = None
        self.is_dead = False

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        if self.is_dead:
            raise WorkerGone("its process ended")
        try:
            async with asyncio.timeout(timeout_s):
                await self.thawed.wait()
                if self.fault is not None and method == "open":
                    raise self.fault
                return await super().call(method, *args, timeout_s=timeout_s)
        except TimeoutError:
            raise NoAnswer(f"no answer within {timeout_s} s") from None


class Processes(SimRuntime):
    """As under Ray, the cluster ends when its server has not called for a while."""

    name = "ray"

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__({pool.name: PoolModel(FAST) for pool in spec.pools}, Environment(), trace=False)
        self.services: dict[str, Service] = {}
        self.replaced: list[str] = []
        self.faults: defaultdict[str, list[Exception]] = defaultdict(list)  # of the next starts, by worker
        self.started_s: defaultdict[str, list[float]] = defaultdict(list)

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        name = order.config.name
        if name in self.handles:  # it outlived its controller
            return cast(WorkerHandle, self.handles[name])
        worker = await super().start_worker(order)
        self.started_s[name].append(asyncio.get_running_loop().time())
        if self.faults[name]:
            assert isinstance(worker, LocalWorker)
            worker.start = _raising(self.faults[name].pop(0))
        return worker

    async def start_service(self, name: str, factory: Callable[..., Any], *args: Any) -> ServiceHandle:
        service = self.services[name] = Service(lambda: factory(*args))
        return service

    async def restart_service(self, handle: ServiceHandle) -> ServiceHandle:
        assert isinstance(handle, Service)
        self.replaced += [name for name, service in self.services.items() if service is handle]
        if isinstance(handle.target, Controller):
            await crash(handle.target)
        else:
            await handle.target.close(0.0)
        handle.thawed.set()
        return await super().restart_service(handle)


async def die_and_restart(service: Service, away_s: float) -> None:
    """A controller's process is killed, and Ray starts it again."""
    service.is_dead = True
    await crash(service.target)
    await asyncio.sleep(away_s)
    service.target, service.is_dead = service.build(), False


async def crash(controller: Controller) -> None:
    """Its process is gone; its workers are not."""
    assert controller._relinking is not None
    tasks = [controller._relinking, *controller._leaving.values()]
    tasks += [replica._task for replica in controller._replicas.values() if replica._task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    if controller._orphan_timer is not None:
        controller._orphan_timer.close()


class FakeServer:
    http_url = ""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context

    async def open(self) -> str:
        return "virtual:0"

    async def close(self, grace_s: float) -> None:
        """Nothing listens."""


def in_virtual_time(received: Callable[[Serving, Processes], Awaitable[None]], gateways: int = 1) -> None:
    """A cluster with gateways as processes of their own, in virtual time."""
    plain = split_spec(1, 1)
    spec = replace(plain, gateway=replace(plain.gateway, replicas=gateways))

    async def all_of_it() -> None:
        runtime = Processes(spec)
        models = {pool.name: PoolModel(FAST) for pool in spec.pools}
        serving = await serve(virtual(spec, models), runtime=runtime, make_server=FakeServer)
        try:
            await received(serving, runtime)
        finally:
            for service in runtime.services.values():
                service.thawed.set()
            await serving.close()

    run(all_of_it())
