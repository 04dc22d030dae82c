"""`diptych adapter`: loads and unloads LoRA adapters of a running cluster."""

import click

from cluster.cli.address import client_options
from cluster.cli.admin import REVISION, change, print_change
from cluster.cli.groups import JSON, GroupedCommand
from diptych.access import Access


@click.group()
def adapter() -> None:
    """Load and unload LoRA adapters.

    \b
    Example:
      diptych adapter load sql /models/sql-lora
    """


@adapter.command(cls=GroupedCommand)
@click.argument("name")
@click.argument("path")
@client_options
@click.option("--model", default="", show_default=False, help="That it changes. [default: the only one]")
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
