"""`diptych flip`, `drain` and `scale`: change a running cluster."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.address import client_options
from cluster.cli.groups import JSON, GroupedCommand, seconds
from cluster.cli.screen import print_json
from diptych.access import Access
from diptych.view import Role

if TYPE_CHECKING:
    from diptych.client import AsyncClient

REVISION = click.option(
    "--revision", type=click.IntRange(min=0), default=0, show_default=False, metavar="NUMBER",
    help="Apply only if the cluster is still at this revision (see `diptych status`).",
)  # fmt: skip


@click.command(cls=GroupedCommand)
@click.argument("worker")
@click.argument("role", type=click.Choice([role.value for role in Role]))
@client_options
@REVISION
@JSON
def flip(worker: str, role: str, endpoint: str, access: Access, revision: int, as_json: bool) -> None:
    """Change a worker's role. Running requests continue; new ones follow the new role.

    \b
    Example:
      diptych flip decode-1 prefill
    """
    new = change(endpoint, access, lambda client: client.flip(worker, Role(role), revision=revision))
    print_change(as_json, new, f"{worker}: role set to {role}", worker=worker, role=role)


@click.command(cls=GroupedCommand)
@click.argument("worker")
@client_options
@seconds("--deadline", "Stop it then even if requests still run there. [default: health.drain_s of the cluster]")
@REVISION
@JSON
def drain(worker: str, endpoint: str, access: Access, deadline_s: float | None, revision: int, as_json: bool) -> None:
    """Remove a worker: it takes no new work and stops when it is empty. Its pool shrinks by one.

    \b
    Example:
      diptych drain decode-1 --deadline 30
    """
    new = change(endpoint, access, lambda client: client.drain(worker, deadline_s=deadline_s, revision=revision))
    print_change(as_json, new, f"{worker}: draining, stops when it is empty", worker=worker)


@click.command(cls=GroupedCommand)
@click.argument("pool")
@click.argument("replicas", type=click.IntRange(min=0))
@client_options
@REVISION
@JSON
def scale(pool: str, replicas: int, endpoint: str, access: Access, revision: int, as_json: bool) -> None:
    """Set the number of workers of a pool. New ones are started; those with the least work are drained.

    \b
    Example:
      diptych scale decode 3 --revision 12
    """
    new = change(endpoint, access, lambda client: client.scale(pool, replicas, revision=revision))
    print_change(
        as_json, new, f"{pool}: target set to {replicas} worker{'s' * (replicas != 1)}", pool=pool, wanted=replicas
    )


def change(endpoint: str, access: Access, act: Callable[["AsyncClient"], Awaitable[int]]) -> int:
    """Make one change. Returns the new revision."""
    from diptych.client import AsyncClient

    async def run() -> int:
        async with AsyncClient(endpoint, access=access) as client:
            return await act(client)

    return asyncio.run(run())


def print_change(as_json: bool, revision: int, text: str, **facts: Any) -> None:
    if as_json:
        print_json({**facts, "revision": revision})
    else:
        click.echo(f"{text} (revision {revision})")
