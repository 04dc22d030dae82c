"""Two different Ray nodes on this machine: workers are placed by their pool's labels and custom resources."""

import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from cluster.runtime.interface import WorkerOrder
from cluster.runtime.ray import NAMESPACE, RayRuntime
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.spec import Resources
from workers.config import WorkerConfig

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.timeout(120)]

STORE = 80 << 20
PLACE_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime() -> AsyncIterator[RayRuntime]:
    """Nodes labeled h100 and a100; the a100 node has a custom resource too."""
    nodes = Cluster()
    nodes.add_node(num_cpus=4, labels={"gpu": "h100"}, object_store_memory=STORE, include_dashboard=False)
    nodes.add_node(num_cpus=4, labels={"gpu": "a100"}, resources={"cheap": 1}, object_store_memory=STORE)
    ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False)
    runtime = RayRuntime(f"test-{secrets.token_hex(4)}")
    try:
        yield runtime
    finally:
        await runtime.close()
        ray.shutdown()
        nodes.shutdown()


def order(name: str, resources: Resources, place_timeout_s: float = PLACE_S) -> WorkerOrder:
    return WorkerOrder(WorkerConfig(name, "a-pool", "a-model"), resources, 1.0, 10.0, place_timeout_s)


async def where(runtime: RayRuntime, name: str, resources: Resources) -> str:
    """The label of the node on which the worker was placed."""
    await runtime.start_worker(order(name, resources))
    groups = placement_group_table().values()
    (group,) = [each for each in groups if each["name"] == f"{runtime.cluster}/{name}" and each["state"] == "CREATED"]
    (node,) = {each["Labels"]["gpu"] for each in ray.nodes() if each["NodeID"] in group["bundles_to_node_id"].values()}
    return str(node)


@pytest.mark.asyncio(loop_scope="module")
async def test_pools_run_on_the_nodes_that_they_name(runtime: RayRuntime) -> None:
    assert await where(runtime, "fast-0", Resources(labels={"gpu": "h100"})) == "h100"
    assert await where(runtime, "cheap-0", Resources(labels={"gpu": "in(a100, l4)"})) == "a100"
    assert await where(runtime, "cheap-1", Resources(labels={"gpu": "!h100"})) == "a100"
    assert await where(runtime, "cheap-2", Resources(custom={"cheap": 1.0})) == "a100"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unavailable_resource_is_refused_with_the_available_ones(runtime: RayRuntime) -> None:
    with pytest.raises(RuntimeUnavailable) as labels:
        await runtime.start_worker(order("l4-0", Resources(labels={"gpu": "l4"}), 0.5))
    message = str(labels.value)
    assert "no room for l4-0: it needs {CPU: 1}, labels {gpu: l4}; no node has these labels" in message
    assert "gpu: h100" in message and "gpu: a100" in message and "\n" not in message
    with pytest.raises(RuntimeUnavailable, match=r"it needs \{CPU: 1, dear: 1\}; the 2 nodes, if empty, would hold"):
        await runtime.start_worker(order("dear-0", Resources(custom={"dear": 1.0}), 0.5))
    with pytest.raises(RuntimeUnavailable, match="which others hold on the only node with these labels"):
        await runtime.start_worker(order("fast-1", Resources(cpu=4, labels={"gpu": "h100"}), 0.5))
