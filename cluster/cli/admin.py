"""`diptych flip`, `drain`, `scale` and `adapter`: change a running cluster."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from cluster.cli.options import GroupedCommand, client_options, seconds
from diptych.access import Access
from diptych.view import Role

if TYPE_CHECKING:
    from diptych.client import Client


REVISION = click.option(
    "--revision", type=click.IntRange(min=0), default=0, show_default=False, metavar="NUMBER",
    help="Apply only if the cluster is still at this revision (see `diptych status`).",
)  # fmt: skip


@click.command(cls=GroupedCommand)
@click.argument("worker")
@click.argument("role", type=click.Choice([role.value for role in Role]))
@client_options
@REVISION
def flip(worker: str, role: str, endpoint: str, access: Access, revision: int) -> None:
    """Change a worker's role. Running requests continue; new ones follow the new role.

    \b
    Example:
      diptych flip decode-1 prefill
    """
    text = f"{worker}: role set to {role}"
    change(endpoint, access, text, lambda client: client.flip(worker, Role(role), revision=revision))


@click.command(cls=GroupedCommand)
@click.argument("worker")
@client_options
@seconds("--deadline", "Stop it then even if requests still run there. [default: health.drain_s of the cluster]")
@REVISION
def drain(worker: str, endpoint: str, access: Access, deadline_s: float | None, revision: int) -> None:
    """Remove a worker: it takes no new work and stops when it is empty. Its pool shrinks by one.

    \b
    Example:
      diptych drain decode-1 --deadline 30
    """
    text = f"{worker}: draining, stops when it is empty"
    change(endpoint, access, text, lambda client: client.drain(worker, deadline_s=deadline_s, revision=revision))


@click.command(cls=GroupedCommand)
@click.argument("pool")
@click.argument("replicas", type=click.IntRange(min=0))
@client_options
@REVISION
def scale(pool: str, replicas: int, endpoint: str, access: Access, revision: int) -> None:
    """Set the number of workers of a pool. New ones are started; those with the least work are drained.

    \b
    Example:
      diptych scale decode 3 --revision 12
    """
    text = f"{pool}: target set to {replicas} worker{'s' * (replicas != 1)}"
    change(endpoint, access, text, lambda client: client.scale(pool, replicas, revision=revision))


def change(endpoint: str, access: Access, text: str, act: Callable[["Client"], int]) -> None:
    """Make one change, and print what it is with the new revision."""
    from diptych.client import Client

    with Client(endpoint, access=access) as client:
        click.echo(f"{text} (revision {act(client)})")


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
