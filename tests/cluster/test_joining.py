"""Gateways that join a running cluster: they serve like others, leave without a loss, and end with the cluster."""

import asyncio
from typing import Any

import pytest

import cluster.join as cluster_joining
from cluster.control.membership import PollingGateways
from cluster.dispatch.dispatcher import Dispatcher
from cluster.frontend.context import GatewayContext
from cluster.join import join, spec_and_models
from cluster.runtime.interface import ServiceHandle
from cluster.runtime.local import LocalRuntime
from cluster.runtime.runtime_errors import RuntimeUnavailable, WorkerGone
from cluster.serving import serve
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, split_spec
from workers.build import build_worker


class FakeServer:
    """Serves nothing, and keeps its context."""

    http_url = ""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context

    async def open(self) -> str:
        return f"{self.context.name}:{self.context.spec.gateway.grpc_port}"

    async def close(self, grace_s: float) -> None:
        """Nothing listens."""


class Gone:
    """A controller that is no more."""

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        raise WorkerGone("it is dead")


def never(context: GatewayContext) -> FakeServer:
    raise AssertionError("a cluster without gateways makes no server")


async def test_gateways_join_a_cluster_that_has_none() -> None:
    servers: list[FakeServer] = []

    def make_server(context: GatewayContext) -> FakeServer:
        servers.append(FakeServer(context))
        return servers[-1]

    shared = SharedMemory()
    runtime = LocalRuntime(
        lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=FAST)
    )
    serving = await serve(split_spec(1, 2), runtime=runtime, make_server=never, gateways=False)
    try:
        assert serving.endpoints == []
        spec, models = await spec_and_models(serving.controller, 5.0)
        joined = [await join(f"gateway-{name}", spec, models, serving.controller, make_server) for name in "ab"]
        assert [each.endpoint for each in joined] == [f"gateway-{name}:{spec.gateway.grpc_port}" for name in "ab"]
        for each in servers:
            assert isinstance(each.context.dispatcher, Dispatcher)
            assert [worker.name for worker in each.context.dispatcher.view.workers] == [
                "prefill-0",
                "decode-0",
                "decode-1",
            ]
        orphaned = asyncio.ensure_future(joined[0].wait_orphaned())
        await asyncio.sleep(0.05)
        assert not orphaned.done()
        orphaned.cancel()
        for gateway in joined:
            await gateway.service.close(1.0)
    finally:
        await serving.close()


async def test_a_joined_gateway_ends_when_its_controller_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_joining, "ORPHAN_AFTER_S", 0.2)
    monkeypatch.setattr(cluster_joining, "KEEP_ALIVE_S", 0.05)
    gone: ServiceHandle = Gone()
    async with asyncio.timeout(30.0):
        await cluster_joining.JoinedGateway(None, gone, "", "").wait_orphaned()  # type: ignore[arg-type]
        with pytest.raises(
            RuntimeUnavailable, match=r"does not answer \(it is dead\) within 0 s; see the output of `diptych serve`"
        ):
            await spec_and_models(gone, 0.2)


async def test_cut_skips_gateways_that_have_ended() -> None:
    asked: list[str] = []

    class Counted(FakeServer):
        async def close(self, grace_s: float) -> None:
            asked.append(f"{grace_s:g}")

    shared = SharedMemory()
    runtime = LocalRuntime(
        lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=FAST)
    )
    serving = await serve(split_spec(1, 1), runtime=runtime, make_server=Counted)
    await asyncio.gather(serving.close(5.0), serving.cancel_requests())
    assert sorted(asked) == ["0", "5"]
    await serving.cancel_requests()
    assert len(asked) == 2


def test_a_gateway_that_stops_polling_is_dropped() -> None:
    there = PollingGateways()
    there.polled("b", 0.0, 15.0)
    there.polled("a", 1.0, 16.0)
    there.polled("b", 10.0, 25.0)
    assert there.names(15.9) == ("b", "a")
    assert there.names(16.0) == ("b",)
    there.polled("a", 17.0, 32.0)
    assert there.names(17.0) == ("b", "a")
