"""The ranks of a gang as Ray actors, in the placement group of their leader: bundle i holds rank i.

They belong to the leader's process: Ray ends them with it, and each ends by itself when its leader hangs up.
"""

import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.runtime.interface import WorkerOrder
from workers.build import serve_rank
from workers.config import WorkerConfig
from workers.executor.order import RankOrder


def bundles(order: WorkerOrder) -> list[dict[str, float]]:
    """What each rank of a worker needs, as Ray counts it."""
    resources = order.resources
    bundle = {"CPU": resources.cpu, "GPU": resources.gpu, **resources.custom}
    bundle = {kind: amount for kind, amount in bundle.items() if amount} or {"CPU": 0.001}
    return [bundle] * order.config.parallel.world_size


def shortage(wanted: Sequence[Mapping[str, float]], placement: str, nodes: Sequence[Mapping[str, float]]) -> str:
    """What a worker needs, and whether nodes of these resources would have it if they were empty."""
    bundle, count = wanted[0], len(wanted)
    rooms = [min(int(node.get(kind, 0) / amount + 1e-9) for kind, amount in bundle.items()) for node in nodes]
    needs = f"it needs {{{listed(bundle)}}}"
    if placement == "strict_spread":
        needs, fits = f"{needs} on each of {count} nodes", sum(room > 0 for room in rooms) >= count
    elif placement == "strict_pack":
        needs, fits = f"{needs} for each of {count} ranks on one node", max(rooms, default=0) >= count
    else:
        needs, fits = f"{needs} for each of {count} ranks", sum(rooms) >= count
    there = "the only node" if len(nodes) == 1 else f"the {len(nodes)} nodes"
    if fits:
        return f"{needs}, which others hold on {there}"
    held = ", ".join(map(str, sorted(rooms, reverse=True))) or "no"
    return f"{needs}; {there}, if empty, would hold {held} ranks"


def listed(resources: Mapping[str, float]) -> str:
    return ", ".join(
        f"{kind}: {amount:g}"
        for kind, amount in sorted(resources.items())
        if ":" not in kind and not kind.startswith("bundle_group")
    )


def rank_options(order: WorkerOrder, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Where one rank goes and what Ray sets aside for it."""
    return {
        "num_cpus": order.resources.cpu,
        "num_gpus": order.resources.gpu,
        "resources": order.resources.custom,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank),
    }


def on_this_node(config: WorkerConfig) -> WorkerConfig:
    """The configuration as this node's processes run it: peers reach them at the node's address."""
    if config.transfer.host != "auto":
        return config
    return replace(config, transfer=replace(config.transfer, host=ray.util.get_node_ip_address()))


class _RankActor:
    """The process of one rank. It lives for one gang and is never restarted: a new leader makes new ranks."""

    async def run(self, order: RankOrder) -> None:
        try:
            await serve_rank(replace(order, config=on_this_node(order.config)))
        finally:
            os._exit(0)  # its compute thread may wait for a rank that has gone; nothing here outlives the gang


class RayRanks:
    """`RankLauncher` in the leader's actor."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._actors: list[Any] = []

    def launch(self, orders: Sequence[RankOrder]) -> Sequence[Awaitable[Any]]:
        group = ray.util.get_current_placement_group()
        assert group is not None, "a leader is always placed in a group"
        ends: list[Awaitable[Any]] = []
        for order in orders:
            options = rank_options(self._order, group, order.seat.rank)
            actor: Any = ray.remote(_RankActor).options(max_restarts=0, **options).remote()
            self._actors.append(actor)
            # Each node has its own address: the rank settles it there.
            ends.append(actor.run.remote(replace(order, config=self._order.config)))
        return ends

    async def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
