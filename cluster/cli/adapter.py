"""`diptych adapter`: the LoRA adapters of a running cluster."""

import asyncio
from typing import TYPE_CHECKING

import click
import msgspec

from cluster.cli.address import client_options
from cluster.cli.admin import JSON, REVISION, change, print_change
from cluster.cli.groups import GroupedCommand
from cluster.cli.screen import console, plain_table, print_json
from diptych.access import Access

if TYPE_CHECKING:
    from diptych.view import Adapter


@click.group()
def adapter() -> None:
    """Load, unload and list LoRA adapters.

    \b
    Example:
      diptych adapter load sql /models/sql-lora
    """


@adapter.command(cls=GroupedCommand)
@click.argument("name")
@click.argument("path")
@client_options
@click.option("--model", default="", help="That it changes. [default: the only one]")
@REVISION
@JSON
def load(name: str, path: str, endpoint: str, access: Access, model: str, revision: int, as_json: bool) -> None:
    """Serve the PEFT folder PATH, the same on every node, as NAME. Requests name it as their model.

    \b
    Example:
      diptych adapter load sql /models/sql-lora
    """
    new = change(endpoint, access, lambda client: client.load_adapter(name, path, model=model, revision=revision))
    print_change(as_json, new, f"{name}: served from {path}", adapter=name, path=path)


@adapter.command(cls=GroupedCommand)
@click.argument("name")
@client_options
@REVISION
@JSON
def unload(name: str, endpoint: str, access: Access, revision: int, as_json: bool) -> None:
    """Refuse new requests for an adapter. Running ones go on.

    \b
    Example:
      diptych adapter unload sql
    """
    new = change(endpoint, access, lambda client: client.unload_adapter(name, revision=revision))
    print_change(as_json, new, f"{name}: not served any more", adapter=name)


@adapter.command("list", cls=GroupedCommand)
@client_options
@JSON
def list_command(endpoint: str, access: Access, as_json: bool) -> None:
    """List the adapters that requests may name.

    \b
    Example:
      diptych adapter list
    """
    found = asyncio.run(_adapters(endpoint, access))
    if as_json:
        return print_json([msgspec.to_builtins(each) for each in found])
    table = plain_table("adapter", "model", "path", "id", ">MB")
    for each in found:
        table.add_row(each.name, each.model, each.path, each.id, f"{each.num_bytes / 1e6:.1f}")
    console().print(table)


async def _adapters(endpoint: str, access: Access) -> "tuple[Adapter, ...]":
    from diptych.client import AsyncClient

    async with AsyncClient(endpoint, access=access) as client:
        return (await client.status()).view.adapters
