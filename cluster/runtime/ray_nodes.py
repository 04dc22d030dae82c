"""Nodes of a Ray that is there: for one that is to go, and for a gateway that comes.

`drain` is no public API of Ray: it is what `ray drain-node` and Ray's own autoscaler call. It stands here alone.
"""

import asyncio
import time
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import PlacementGroup, placement_group

from cluster.runtime.errors import RuntimeUnavailable
from cluster.runtime.interface import ServiceHandle
from cluster.runtime.ray import NAMESPACE, RayService, answer_of

LOOK_S = 1.0  # Ray tells nobody when a name appears
CONTROLLER = "/controller"
NODE_LABEL = "ray.io/node-id"
HELD = {"memory": 1.0}  # a byte
HOLD_S = 10.0
ASK_S = 5.0


def this_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def find_node(named: str) -> str:
    """The full id of a living node, by the beginning of its id or by its address. Raises `RuntimeUnavailable`."""
    alive = [each for each in ray.nodes() if each["Alive"]]
    found = [
        each["NodeID"] for each in alive if each["NodeID"].startswith(named) or each["NodeManagerAddress"] == named
    ]
    if len(found) != 1:
        there = ", ".join(f"{each['NodeManagerAddress']} ({each['NodeID'][:12]})" for each in alive)
        raise RuntimeUnavailable(f"{len(found) or 'no'} living nodes of Ray are called {named!r}; there are {there}")
    return str(found[0])


def workers_on(node: str) -> dict[str, tuple[str, ...]]:
    """By cluster, the workers with a rank on this node."""
    found: dict[str, tuple[str, ...]] = {}
    for group in ray.util.placement_group_table().values():
        cluster, _, worker = group["name"].rpartition("/")
        if cluster and group["state"] != "REMOVED" and node in group["bundles_to_node_id"].values():
            found[cluster] = (*found.get(cluster, ()), worker)
    return found


async def served_from(node: str) -> list[str]:
    """The clusters whose controller is on this node: they end with it."""
    named = ray.util.list_named_actors(all_namespaces=True)
    clusters = [each["name"].removesuffix(CONTROLLER) for each in named if each["name"].endswith(CONTROLLER)]
    handles = [(cluster, find_controller(cluster)) for cluster in clusters]
    asked = [
        (cluster, answer_of(handle.actor.node.remote(), ASK_S)) for cluster, handle in handles if handle is not None
    ]
    nodes = await asyncio.gather(*(answer for _, answer in asked), return_exceptions=True)
    return [cluster for (cluster, _), found in zip(asked, nodes, strict=True) if found == node]


def find_controller(cluster: str) -> RayService | None:
    """None: nobody serves this cluster now."""
    name = f"{cluster}{CONTROLLER}"
    try:
        return RayService(name, ray.get_actor(name, NAMESPACE))
    except ValueError:
        return None


async def await_controller(cluster: str, timeout_s: float) -> ServiceHandle:
    """The controller of a cluster that may still be about to come. Raises `RuntimeUnavailable`."""
    clock = asyncio.get_running_loop()
    deadline_s = clock.time() + timeout_s
    while (controller := find_controller(cluster)) is None:
        if clock.time() > deadline_s:
            raise RuntimeUnavailable(
                f"no cluster called {cluster!r} is served on this Ray within {timeout_s:.0f} s; look at --cluster, and "
                "at `diptych serve`"
            )
        await asyncio.sleep(LOOK_S)
    return controller


async def drain(node: str, deadline_s: float) -> None:
    """From now on Ray places nothing on this node. Raises `RuntimeUnavailable`.

    A drained node ends, and takes its drivers along, as soon as nothing is held there; a byte of its memory is, until
    this process has ended.
    """
    held: PlacementGroup = placement_group([HELD], bundle_label_selector=[{NODE_LABEL: node}])
    await asyncio.to_thread(held.wait, HOLD_S)  # a node without a byte left is not idle either
    await asyncio.to_thread(_drain, node, deadline_s)


def _drain(node: str, deadline_s: float) -> None:
    reasons: Any = autoscaler_pb2
    reason = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    internal: Any = ray._raylet
    client = internal.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(node, reason, "diptych leave", int((time.time() + deadline_s) * 1000))
    if not accepted:
        raise RuntimeUnavailable(f"Ray does not drain node {node[:12]}: {why}")
