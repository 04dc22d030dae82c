"""`diptych status`: one look at a running cluster."""

import asyncio
from typing import TYPE_CHECKING

import click

from cluster.cli.screen import console, links_table, print_json, view_json, workers_table
from cluster.cli.talk import ENDPOINT

if TYPE_CHECKING:
    from cluster.api.client import ClusterStatus


@click.command()
@ENDPOINT
@click.option("--wait", "wait_s", type=float, metavar="SECONDS", help="Wait until the cluster is ready, so long.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def status(endpoint: str, wait_s: float | None, as_json: bool) -> None:
    """Show workers, their load, and the links between them.

    \b
    Example:
      diptych status --endpoint 127.0.0.1:50051 --wait 60
    """
    found = asyncio.run(_status(endpoint, wait_s))
    view = found.view
    if as_json:
        gateway = {"name": found.gateway, "active": found.active_requests, "max_requests": found.max_requests}
        print_json(view_json(view) | {"gateway": gateway})
        return
    screen = console()
    model = view.model.name if view.model else "not loaded yet"
    load = f"{found.active_requests} of at most {found.max_requests} requests"
    screen.print(f"cluster {view.name}, model {model}, {found.gateway}: {load}", markup=False)
    screen.print(workers_table(view))
    if view.links:
        screen.print(links_table(view))


async def _status(endpoint: str, wait_s: float | None) -> "ClusterStatus":
    from cluster.api.client import DiptychClient

    async with DiptychClient(endpoint) as client:
        if wait_s is not None:
            await client.wait_ready(wait_s)
        return await client.status()
