"""`diptych adapter`: loads and unloads LoRA adapters of a running cluster."""

import click

from cluster.cli.address import client_options
from cluster.cli.admin import REVISION, change
from cluster.cli.groups import GroupedCommand
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
def load(name: str, path: str, endpoint: str, access: Access, model: str, revision: int) -> None:
    """Serve the PEFT folder PATH, the same on every node, as NAME. Requests name it as their model.

    \b
    Example:
      diptych adapter load sql /models/sql-lora
    """
    text = f"{name}: served from {path}"
    change(endpoint, access, text, lambda client: client.load_adapter(name, path, model=model, revision=revision))


@adapter.command(cls=GroupedCommand)
@click.argument("name")
@client_options
@REVISION
def unload(name: str, endpoint: str, access: Access, revision: int) -> None:
    """Refuse new requests for an adapter. Running ones go on.

    \b
    Example:
      diptych adapter unload sql
    """
    text = f"{name}: not served any more"
    change(endpoint, access, text, lambda client: client.unload_adapter(name, revision=revision))
