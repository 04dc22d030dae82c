"""The first workers load before the controller asks for them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.control.pools import first_orders
from cluster.runtime.interface import ServiceHandle, WorkerHandle, WorkerOrder
from cluster.runtime.local import LocalRuntime
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.serving import serve
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, split_spec
from tests.cluster.test_joining import never
from workers.build import build_worker

KINDS = ("prestart", "service", "worker")


class Prestarting(LocalRuntime):
    """Records what starts. `full`: the worker that there is no room for."""

    def __init__(self, full: str = "") -> None:
        shared = SharedMemory()
        super().__init__(
            lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=FAST)
        )
        self.started: list[tuple[str, object]] = []
        self.cancelled: list[str] = []
        self._full = full

    async def prestart(self, order: WorkerOrder) -> None:
        self.started.append(("prestart", order))
        if order.config.name == self._full:
            raise RuntimeUnavailable(f"no room for {self._full}")
        if self._full:
            try:
                await asyncio.sleep(3600.0)
            finally:
                self.cancelled.append(order.config.name)

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        self.started.append(("worker", order))
        return await super().start_worker(order)

    async def start_service(self, name: str, factory: Callable[..., Any], *args: Any) -> ServiceHandle:
        self.started.append(("service", name))
        return await super().start_service(name, factory, *args)


async def test_the_controller_asks_for_the_same_workers_that_load_already() -> None:
    runtime = Prestarting()
    serving = await serve(split_spec(1, 2), runtime=runtime, make_server=never, gateways=False)
    try:
        early, services, asked = ([each for kind, each in runtime.started if kind == wanted] for wanted in KINDS)
        assert [kind for kind, _ in runtime.started] == ["prestart"] * 3 + ["service"] + ["worker"] * 3
        assert services == ["controller"] and asked == early
        names = [order.config.name for order in first_orders(serving.spec, "secret")]
        assert names == ["prefill-0", "decode-0", "decode-1"]
    finally:
        await serving.close()


async def test_without_room_for_a_worker_nothing_else_goes_on_starting() -> None:
    """Ray ends next, and a call after that would start another one."""
    runtime, lines = Prestarting(full="decode-1"), list[str]()
    with pytest.raises(RuntimeUnavailable, match="no room for decode-1"):
        await serve(split_spec(1, 2), runtime=runtime, make_server=never, progress=lines.append)
    assert sorted(runtime.cancelled) == ["decode-0", "prefill-0"]
    assert {kind for kind, _ in runtime.started} == {"prestart"}
    assert lines == ["closing"]
