"""Nodes and controllers of a running Ray, for `diptych leave` and for gateways that join.

`drain` uses the internal API of `ray drain-node` and Ray's autoscaler, because there is no public one.
"""

import asyncio
import time
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import PlacementGroup, placement_group

from cluster.runtime.interface import ServiceHandle
from cluster.runtime.ray import NAMESPACE, RayService, answer_of
from cluster.runtime.runtime_errors import RuntimeUnavailable

RECHECK_S = 1.0  # Ray has no event for a new name
CONTROLLER = "/controller"
NODE_LABEL = "ray.io/node-id"
RESERVED = {"memory": 1.0}  # a byte
RESERVE_S = 10.0
ASK_S = 5.0


def this_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def find_node(named: str) -> str:
    """The full id of a live node, by a prefix of its id or by its address. Raises `RuntimeUnavailable`."""
    alive = [each for each in ray.nodes() if each["Alive"]]
    found = [
        each["NodeID"] for each in alive if each["NodeID"].startswith(named) or each["NodeManagerAddress"] == named
    ]
    if len(found) != 1:
        there = ", ".join(f"{each['NodeManagerAddress']} ({each['NodeID'][:12]})" for each in alive)
        raise RuntimeUnavailable(f"{len(found) or 'no'} live nodes of Ray match {named!r}; there are {there}")
    return str(found[0])


def workers_on(node: str) -> dict[str, tuple[str, ...]]:
    """The workers with a rank on this node, by cluster."""
    found: dict[str, tuple[str, ...]] = {}
    for group in ray.util.placement_group_table().values():
        cluster, _, worker = group["name"].rpartition("/")
        if cluster and group["state"] != "REMOVED" and node in group["bundles_to_node_id"].values():
            found[cluster] = (*found.get(cluster, ()), worker)
    return found


async def served_from(node: str) -> list[str]:
    """The clusters that have their controller on this node, and end with it."""
    named = ray.util.list_named_actors(all_namespaces=True)
    clusters = [each["name"].removesuffix(CONTROLLER) for each in named if each["name"].endswith(CONTROLLER)]
    handles = [(cluster, find_controller(cluster)) for cluster in clusters]
    asked = [
        (cluster, answer_of(handle.actor.node.remote(), ASK_S)) for cluster, handle in handles if handle is not None
    ]
    nodes = await asyncio.gather(*(answer for _, answer in asked), return_exceptions=True)
    return [cluster for (cluster, _), found in zip(asked, nodes, strict=True) if found == node]


def find_controller(cluster: str) -> RayService | None:
    """None: this cluster is not running."""
    name = f"{cluster}{CONTROLLER}"
    try:
        return RayService(name, ray.get_actor(name, NAMESPACE))
    except ValueError:
        return None


async def await_controller(cluster: str, timeout_s: float) -> ServiceHandle:
    """Wait for the controller of a cluster. Raises `RuntimeUnavailable`.

    Ray's head may be replaced meanwhile. Then this process sees the new head's tables, but its node is not part of that
    Ray, and calls reach no actor.
    """
    clock = asyncio.get_running_loop()
    deadline_s = clock.time() + timeout_s
    while (controller := find_controller(cluster)) is None:
        if not await asyncio.to_thread(_is_node_alive):
            raise RuntimeUnavailable("the head of this node's Ray was replaced; run `ray start` here again, then this")
        if clock.time() > deadline_s:
            raise RuntimeUnavailable(
                f"no cluster called {cluster!r} is served on this Ray within {timeout_s:.0f} s; check --cluster and "
                "`diptych serve`"
            )
        await asyncio.sleep(RECHECK_S)
    return controller


def _is_node_alive() -> bool:
    """Whether Ray's head counts this node as one of its own."""
    node = ray.get_runtime_context().get_node_id()
    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


async def drain(node: str, deadline_s: float) -> None:
    """Stop Ray from placing anything on this node. Raises `RuntimeUnavailable`.

    Ray stops a drained node and its drivers as soon as none of its resources is reserved. So this process reserves a
    byte of its memory until it exits.
    """
    group: PlacementGroup = placement_group([RESERVED], bundle_label_selector=[{NODE_LABEL: node}])
    await asyncio.to_thread(group.wait, RESERVE_S)  # if no byte is free, the node is not idle anyway
    await asyncio.to_thread(_drain, node, deadline_s)


def _drain(node: str, deadline_s: float) -> None:
    reasons: Any = autoscaler_pb2
    reason = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    internal: Any = ray._raylet
    client = internal.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(node, reason, "diptych leave", int((time.time() + deadline_s) * 1000))
    if not accepted:
        raise RuntimeUnavailable(f"Ray does not drain node {node[:12]}: {why}")
