"""`diptych leave`: drains a Ray node. Its work continues on other nodes."""

import asyncio
from dataclasses import asdict, dataclass

import click

from cluster.cli.options import JSON, GroupedCommand, seconds
from cluster.cli.screen import print_json

RECHECK_S = 5.0  # interval of reading Ray's table while the membership does not change
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class LeaveResult:
    """Workers that left the node, and those still there at the deadline."""

    node: str
    left: tuple[str, ...]
    still_there: tuple[str, ...]
    seconds: float


@click.command(cls=GroupedCommand)
@click.argument("node", required=False)
@seconds("--deadline", "Wait no longer than this; what is left is computed again elsewhere when the node goes.", 60.0)
@JSON
def leave(node: str | None, deadline_s: float, as_json: bool) -> None:
    """Empty a Ray node before it goes. NODE is its id or its address; the default is this machine.

    Ray places nothing more there. Its workers take no new work, their streams migrate to other workers, and each worker
    restarts where there is room. Returns when none is left. Joins the Ray of RAY_ADDRESS, or the one of this machine.

    \b
    Example:
      diptych leave --deadline 120
    """
    result = asyncio.run(_leave(node, deadline_s))
    if as_json:
        print_json(asdict(result))
    else:
        click.echo(_summary(result))
    if result.still_there:
        raise click.exceptions.Exit(1)


def _summary(result: LeaveResult) -> str:
    node = f"node {result.node[:12]}"
    if result.still_there:
        return f"{node} still has {', '.join(result.still_there)} after {result.seconds:.1f} s"
    return f"{node} is empty after {result.seconds:.1f} s; {', '.join(result.left) or 'no worker'} left it"


async def _leave(named: str | None, deadline_s: float) -> LeaveResult:
    from cluster.runtime.runtime_errors import RuntimeUnavailable
    from cluster.runtime.sessions import settle_join

    settle_join()
    from cluster.runtime.ray_nodes import drain, find_node, served_from, this_node
    from cluster.runtime.ray_start import join_ray

    await join_ray()
    node = this_node() if named is None else find_node(named)
    if clusters := await served_from(node):
        owner = f"node {node[:12]} has the controller of {', '.join(clusters)}"
        raise RuntimeUnavailable(f"{owner}, which would end with it; end `diptych serve` there")
    await drain(node, deadline_s)
    return await _empty(node, deadline_s)


async def _empty(node: str, deadline_s: float) -> LeaveResult:
    """Ask the controllers of all clusters with workers on this node to move them, and wait until they have."""
    from cluster.runtime.ray_nodes import find_controller, workers_on
    from cluster.runtime.runtime_errors import WorkerGone

    clock = asyncio.get_running_loop().time
    begun_s, seen = clock(), dict[str, None]()
    while True:
        there = workers_on(node)
        names = tuple(f"{cluster}/{worker}" for cluster, workers in there.items() for worker in workers)
        seen |= dict.fromkeys(names)
        left_s = deadline_s - (clock() - begun_s)
        controllers = {cluster: controller for cluster in there if (controller := find_controller(cluster)) is not None}
        if not controllers or left_s <= 0:  # workers without a controller exit by themselves
            return LeaveResult(node, tuple(name for name in seen if name not in names), names, clock() - begun_s)
        for cluster, controller in controllers.items():
            try:
                revision = await controller.call("drain_workers", there[cluster], left_s, timeout_s=left_s)
                await controller.call("members", revision, min(RECHECK_S, left_s))
            except WorkerGone:  # the controller restarts, or the cluster ends
                await asyncio.sleep(min(RETRY_S, left_s))
