"""`diptych trace`: writes recent requests and events of a running cluster for ui.perfetto.dev."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.options import FILE, GroupedCommand, access_options, endpoint_option
from cluster.cli.screen import say
from diptych.access import Access

if TYPE_CHECKING:
    from diptych.history import Window

SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(ctx: click.Context, option: click.Parameter, given: str | None) -> float | None:
    """60, 60s, 5m or 1h, as seconds."""
    if given is None:
        return None
    found = SPAN.fullmatch(given)
    if found is None or not float(found[1]) > 0:
        raise click.BadParameter(f"{given!r} is not a duration; write 60s, 5m or 1h", ctx, option)
    return float(found[1]) * SECONDS[found[2]]


def _moment(ctx: click.Context, option: click.Parameter, given: str | None) -> int | None:
    """A time as Unix nanoseconds; local unless it has a time zone."""
    if given is None:
        return None
    text = given if "-" in given else f"{datetime.now().date().isoformat()}T{given}"
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1e6) * 1000
    except ValueError:
        right = "write 14:05:09 or 2026-01-31T14:05:09"
        raise click.BadParameter(f"{given!r} is not a time; {right}", ctx, option) from None


@click.command(cls=GroupedCommand)
@endpoint_option("Gateway to ask; repeatable, since each knows only its own requests.", several=True)
@access_options
@click.option("--last", "last_s", metavar="TIME", callback=duration, help="Up to now: 60s, 5m or 1h. [default: 60s]")
@click.option("--from", "begin_ns", metavar="TIME", callback=_moment, help="Such as 14:05:09, by the gateway's clock.")
@click.option("--to", "end_ns", metavar="TIME", callback=_moment, help="End of the window. [default: now]")
@click.option("-o", "--out", type=FILE, default=Path("trace.json"), help="Output file.")
def trace(
    endpoints: tuple[str, ...],
    access: Access,
    last_s: float | None,
    begin_ns: int | None,
    end_ns: int | None,
    out: Path,
) -> None:
    """Write a time window of a cluster as a trace for ui.perfetto.dev.

    The trace has each request's phases on the workers that ran them; role changes, migrations and refusals; queues
    and KV.

    \b
    Example:
      diptych trace --last 60s -o trace.json
      diptych trace --from 14:05:00 --to 14:06:30
    """
    if last_s is not None and (begin_ns is not None or end_ns is not None):
        raise click.UsageError("--last ends now: give either --last, or --from and --to")
    if begin_ns is None and end_ns is not None:
        raise click.UsageError("--to needs a --from")
    if begin_ns is not None and end_ns is not None and begin_ns > end_ns:
        raise click.UsageError("--from is later than --to")
    if last_s is None and begin_ns is None:
        last_s = 60.0
    from diptych.client import Client

    windows = {}
    for endpoint in endpoints:
        with Client(endpoint, access=access) as client:
            gateway, window = client.trace(last_s=last_s, begin_unix_ns=begin_ns or 0, end_unix_ns=end_ns or 0)
            windows[gateway] = window
    _write(windows, out)


def _write(windows: dict[str, "Window"], out: Path) -> None:
    from cluster.offline.report.perfetto import write_events
    from cluster.offline.report.window import events

    about: dict[str, Any] = {"gateways": list(windows), "written": datetime.now(UTC).isoformat(timespec="seconds")}
    cut = {gateway: _second(window.whole_ns) for gateway, window in windows.items() if window.whole_ns}
    if cut:
        about["complete_from"] = {gateway: whole.isoformat() for gateway, whole in cut.items()}
    write_events(events(windows), about, out)
    traces = [trace for window in windows.values() for trace in window.traces]
    running = sum(not trace.outcome for trace in traces)
    num_events = sum(len(window.events) for window in windows.values())
    say(f"{out}: {len(traces)} requests, {running} of them in progress, {num_events} events")
    for gateway, whole in cut.items():
        say(f"{gateway}: complete only from {whole.astimezone():%H:%M:%S} on; older requests are no longer in memory")
    if not traces:
        say("no request of this window is in memory; gateway.trace_s and gateway.trace_requests set how much is kept")
    say("open it in ui.perfetto.dev")


def _second(unix_ns: int) -> datetime:
    """The first whole second after this time."""
    return datetime.fromtimestamp(unix_ns // 10**9 + 1, UTC)
