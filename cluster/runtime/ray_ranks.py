"""The ranks of a gang as Ray actors, in the placement group of their leader: bundle i is for rank i.

The leader's process owns them: Ray kills them with it, and each exits if its leader disconnects.
"""

import os
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.runtime.interface import WorkerOrder
from cluster.runtime.logs import configure_logging
from cluster.spec import LogSpec
from workers.config import WorkerConfig

if TYPE_CHECKING:
    from workers.executor.rank_spec import RankSpec


def rank_options(order: WorkerOrder, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Placement and resources of one rank."""
    return {
        "num_cpus": order.resources.cpu,
        "num_gpus": order.resources.gpu,
        "resources": order.resources.custom,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank),
    }


def on_this_node(config: WorkerConfig) -> WorkerConfig:
    """The configuration with this node's address, by which peers connect to it."""
    if config.transfer.host != "auto":
        return config
    return replace(config, transfer=replace(config.transfer, host=ray.util.get_node_ip_address()))


class _RankActor:
    """The process of one rank. Never restarted: a new leader starts new ranks."""

    async def run(self, spec: "RankSpec", logs: LogSpec) -> None:
        from workers.build import serve_rank  # see `cluster.runtime.ray`

        configure_logging(logs, f"{spec.config.name}, rank {spec.rendezvous.rank}")
        try:
            await serve_rank(replace(spec, config=on_this_node(spec.config)))
        finally:
            os._exit(0)  # its compute thread may still wait for a rank that is gone


class RayRanks:
    """`RankLauncher` in the leader's actor."""

    def __init__(self, order: WorkerOrder, logs: LogSpec) -> None:
        self._order = order
        self._logs = logs
        self._actors: list[Any] = []

    def launch(self, specs: "Sequence[RankSpec]") -> Sequence[Awaitable[Any]]:
        group = ray.util.get_current_placement_group()
        assert group is not None, "a leader is always placed in a group"
        ends: list[Awaitable[Any]] = []
        for spec in specs:
            options = rank_options(self._order, group, spec.rendezvous.rank)
            actor: Any = ray.remote(_RankActor).options(max_restarts=0, **options).remote()
            self._actors.append(actor)
            # Without the leader's address, because each rank sets that of its own node.
            ends.append(actor.run.remote(replace(spec, config=self._order.config), self._logs))
        return ends

    async def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
