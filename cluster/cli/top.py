"""`diptych top`: a running cluster, refreshed every second, until Ctrl-C."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import click

from cluster.cli.lifetime import run
from cluster.cli.options import GroupedCommand, client_options, seconds
from cluster.cli.screen import console
from diptych.access import Access
from diptych.errors import DiptychError

if TYPE_CHECKING:
    from cluster.cli.rates import StatusWindow
    from diptych.client import AsyncClient


@click.command(cls=GroupedCommand)
@client_options
@seconds("--interval", "Time between snapshots.", 1.0, least=0.1)
@seconds("--deadline", "Exit when the gateway has not answered for this long. [default: never]", least=0.0)
def top(endpoint: str, access: Access, interval_s: float, deadline_s: float | None) -> None:
    """Watch pools, queues, KV, transfers and SLO attainment until Ctrl-C.

    \b
    in, out    KV handoffs that a worker waits for, and that it holds for others
    KV/s       KV received by a worker
    hits       share of prompt tokens that were cached

    Requests, tokens and SLO attainment are those of the gateway that answers. Without a terminal: one snapshot.

    \b
    Example:
      diptych top --endpoint 127.0.0.1:50051
    """
    try:
        if not sys.stdout.isatty() or console().is_dumb_terminal:
            run(_once(endpoint, access, interval_s))
        else:
            run(_watch(endpoint, access, interval_s, deadline_s))
    except KeyboardInterrupt:
        return  # the normal end


async def _once(endpoint: str, access: Access, interval_s: float) -> None:
    from cluster.cli.dashboard import screen
    from cluster.cli.rates import StatusWindow
    from diptych.client import AsyncClient

    snapshots = StatusWindow()
    async with AsyncClient(endpoint, access=access) as client:
        await _add_snapshot(client, snapshots)
        await asyncio.sleep(interval_s)
        await _add_snapshot(client, snapshots)
    shown = console()
    shown.print(screen(snapshots, shown.width, once=True))


async def _watch(endpoint: str, access: Access, interval_s: float, deadline_s: float | None) -> None:
    from rich.live import Live

    from cluster.cli.dashboard import screen
    from cluster.cli.rates import StatusWindow
    from diptych.client import AsyncClient

    snapshots, shown = StatusWindow(), console()
    async with AsyncClient(endpoint, access=access) as client:
        await _add_snapshot(client, snapshots)
        with Live(console=shown, screen=True, auto_refresh=False) as live:
            silent_since_s: float | None = None
            trouble = ""
            while True:
                live.update(screen(snapshots, shown.width, shown.height, trouble=trouble), refresh=True)
                await asyncio.sleep(interval_s)
                try:
                    await _add_snapshot(client, snapshots)
                    silent_since_s, trouble = None, ""
                except DiptychError as error:
                    silent_since_s = silent_since_s or time.monotonic()
                    silent_s = time.monotonic() - silent_since_s
                    if deadline_s is not None and silent_s >= deadline_s:
                        raise
                    trouble = f"no answer for {silent_s:.0f} s, trying again: {error}"


async def _add_snapshot(client: "AsyncClient", snapshots: "StatusWindow") -> None:
    from cluster.cli.rates import Snapshot

    status = await client.status()
    snapshots.add(Snapshot(time.monotonic(), status))
