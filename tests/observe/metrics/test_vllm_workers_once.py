"""Of several gateways exactly one exports vLLM's series of workers, whatever their names, and also when one leaves."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

import cluster.control.controller as cluster_controller
import cluster.dispatch.discovery as discovery
from cluster.frontend.context import GatewayContext
from cluster.join import join, spec_and_models
from cluster.policy.slo_attainment import GatewayAttainment
from cluster.runtime.interface import WorkerOrder
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, split_spec
from tests.observe.exposition import exposition
from workers.build import build_worker
from workers.server import WorkerServer

NAMES = ("gateway-llm-6d9f-x2x", "gateway-llm-6d9f-a7b")  # as they join: the least came later
WORKERS = {"prefill-0", "decode-0", "decode-1"}


def engines(text: str) -> set[str]:
    """Whom vLLM's gauge of running requests is told of."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = families.get("vllm:num_requests_running")
    return set() if found is None else {sample.labels["engine"] for sample in found.samples}


@pytest.mark.parametrize(("gateway", "workers"), [(NAMES[0], {"w"}), (NAMES[1], set())])
def test_the_first_joined_gateway_exports_workers(gateway: str, workers: set[str]) -> None:
    view = ClusterView(1, "c", None, (WorkerView("w", "p", Role.MIXED, WorkerState.READY),), gateways=NAMES)
    assert engines(exposition(GatewayAttainment(), gateway, view, compat="vllm")) == workers


class Door:
    """No server; it tells what a server would."""

    http_url = ""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def open(self) -> str:
        return f"{self._context.name}:1"

    async def close(self, grace_s: float) -> None:
        """Nothing listens."""

    def engines(self) -> set[str]:
        dispatcher = self._context.dispatcher
        return engines(exposition(dispatcher.slo_attainment(), self._context.name, dispatcher.view, compat="vllm"))


async def test_another_gateway_exports_workers_when_the_first_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "WATCH_S", 0.2)
    monkeypatch.setattr(cluster_controller, "SILENT_S", 1.0)
    shared = SharedMemory()
    doors: list[Door] = []

    def build(order: WorkerOrder) -> WorkerServer:
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=FAST)

    def door(context: GatewayContext) -> Door:
        doors.append(Door(context))
        return doors[-1]

    serving = await serve(split_spec(1, 2), runtime=LocalRuntime(build), make_server=door, gateways=False)
    try:
        spec, models = await spec_and_models(serving.controller, 5.0)
        first, second = [await join(name, spec, models, serving.controller, door) for name in NAMES]
        async with asyncio.timeout(20.0):
            while [each.engines() for each in doors] != [WORKERS, set()]:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)  # neither gives up its part as long as both are there
            assert [each.engines() for each in doors] == [WORKERS, set()]
            await first.service.close(0.0)
            while doors[1].engines() != WORKERS:
                await asyncio.sleep(0.02)
        await second.service.close(0.0)
    finally:
        await serving.close()
