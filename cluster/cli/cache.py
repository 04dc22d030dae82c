"""`diptych cache`: the tiers of a running cluster's prefix caches, and files of cached KV."""

import asyncio
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from cluster.cli.address import client_options
from cluster.cli.groups import GroupedCommand
from cluster.cli.screen import console, plain_table, print_json, progress_bar
from cluster.cli.tiers import tier_troubles, tiers_table
from diptych.access import Access

if TYPE_CHECKING:
    from diptych.view import ClusterView

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group()
def cache() -> None:
    """Show the tiers of prefix caches, and check files of cached KV.

    \b
    Example:
      diptych cache status
    """


@cache.command("status", cls=GroupedCommand)
@client_options
@JSON
def status_command(endpoint: str, access: Access, as_json: bool) -> None:
    """Show what each worker caches on its device, in host memory and on its disk.

    \b
    Example:
      diptych cache status --endpoint 127.0.0.1:50051
    """
    view = asyncio.run(_view(endpoint, access))
    if as_json:
        workers = {}
        for worker in view.workers:
            stats = worker.stats
            device = {"blocks": stats.cached_blocks, "hit_tokens": stats.device_hit_tokens}
            workers[worker.name] = {"device": device, "tiers": msgspec.to_builtins(stats.tiers)}
        return print_json(workers)
    screen = console()
    screen.print(tiers_table(view))
    for line in tier_troubles(view):
        screen.print(line, markup=False)


async def _view(endpoint: str, access: Access) -> "ClusterView":
    from diptych.client import AsyncClient

    async with AsyncClient(endpoint, access=access) as client:
        return (await client.status()).view


@cache.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@JSON
def verify(path: Path, as_json: bool) -> None:
    """Compare the digests of all blocks in the file of a worker that is stopped. PATH: cache.disk.path, or below it.

    Exits with 1 if a block is corrupt. A worker ignores slots that are torn or foreign, and a corrupt one is a miss.

    \b
    Example:
      diptych cache verify /var/kv
    """
    from workers.kv_store.verify import SlabReport, find_slabs, verify_slab

    with progress_bar() as progress:
        reports = [verify_slab(each, progress) for each in find_slabs(path)]
    if as_json:
        print_json([asdict(each) for each in reports])
    else:
        names = [each.name for each in fields(SlabReport)]
        table = plain_table(names[0], *(f">{name.replace('_', ' ')}" for name in names[1:]))
        for each in reports:
            table.add_row(*map(str, asdict(each).values()))
        console().print(table)
    if corrupt := sum(each.corrupt for each in reports):
        raise click.ClickException(f"corrupt blocks: {corrupt}; check the disk, and delete the file to start anew")
