"""The screen of `diptych top`, for 80 columns and more."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from textwrap import wrap
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.cli.rates import Rates, StatusWindow, WorkerRates
from cluster.cli.screen import COLORS, decision_text, models_text, named_class, size
from cluster.cli.tiers import loan_lines, tier_lines, tier_problems
from cluster.policy.slo_attainment import SLOCount
from diptych.client import ClusterStatus
from diptych.history import ClusterEvent, Traffic
from diptych.view import ClusterView, DecisionRecord, WorkerState, WorkerView

WIDE = 120  # columns; narrower screens leave details out
MAX_FOOTER_LINES, MAX_SLO_LINES = 6, 3
NARROW_REST = 67  # width of a narrow table without the worker names
UNKNOWN = "-"
NBSP = "\u00a0"  # no-break space


def screen(
    snapshots: StatusWindow, width: int, height: int | None = None, *, trouble: str = "", once: bool = False
) -> Group:
    """Header, a row for each pool and its workers, and the latest events. `height`: lines of the terminal; shows a
    count of the workers that do not fit. `trouble`: why the snapshot is old.
    """
    status, rates = snapshots.latest.status, snapshots.rates(since_beginning=once)
    head = [*_header(status, rates, width, trouble)]
    foot = [*_footer(status, width)]
    room = None if height is None else max(3, height - len(head) - len(foot) - 3)
    return Group(*head, "", _table(status, rates, width, room), "", *foot)


def _header(status: ClusterStatus, rates: Rates, width: int, trouble: str) -> Iterator[Text]:
    view, uptime = status.view, duration_text(status.recent.uptime_s)
    named = f"{view.name}  {models_text(view)}  revision {view.revision}  {status.gateway} up {uptime}"
    yield Text(named, style="bold", no_wrap=True, overflow="ellipsis")
    refused = f"  {rates.refused_s:.1f} refused/s" if rates.refused_s else ""
    load = f"{status.active_requests} of {status.max_requests} in flight, {status.slo_attainment.queued} queued"
    yield _line(f"{_rate(rates.requests_s)} requests/s  {_rate(rates.tokens_s)} tokens/s{refused}  {load}")
    when = "since the gateway started" if rates.kept_s is None else f"last {rates.kept_s:.0f} s"
    classes = ((named_class(score), _attainment_text(score.ttft, score.tpot)) for score in rates.kept)
    attained = "; ".join(f"{name}{NBSP}{text}" for name, text in classes if text) or "no request with an SLO yet"
    for line in wrap(f"SLO attainment, {when}: {attained}", width, subsequent_indent="  ")[:MAX_SLO_LINES]:
        yield _line(line.replace(NBSP, " "))
    if trouble:
        yield Text(trouble, style="bold red", no_wrap=True, overflow="ellipsis")


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _attainment_text(ttft: SLOCount, tpot: SLOCount) -> str:
    known = [(name, count) for name, count in (("TTFT", ttft), ("TPOT", tpot)) if count.share is not None]
    return NBSP.join(f"{name}{NBSP}{kept.share:.0%}{NBSP}of{NBSP}{kept.settled}" for name, kept in known)


def _table(status: ClusterStatus, rates: Rates, width: int, room: int | None) -> Table:
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0), header_style="bold underline")
    headers = ["worker", "role", "state", ">run", ">wait", "KV", ">used", ">hits", ">in", ">out", ">KV/s", ">tok/s"]
    for header in [*headers, *([">steps/s", "last change"] if wide else [])]:
        justify: Literal["left", "right"] = "right" if header.startswith(">") else "left"
        longest = None if wide or header != "worker" else max(8, width - NARROW_REST)
        table.add_column(header.lstrip(">"), justify=justify, no_wrap=True, overflow="ellipsis", max_width=longest)
    traffic = dict(status.recent.traffic)
    rows = [*_rows(status.view)]
    shown, left = _fitting(rows, room)
    for pool, worker in shown:
        if worker is None:
            table.add_row(*_pool_cells(pool, status.view, rates, wide), style="bold")
        else:
            rate = rates.workers.get(worker.name, WorkerRates())
            table.add_row(*_cells(worker, rate, traffic.get(worker.name, Traffic()), wide))
    if left:
        table.add_row(f"and {left} more", style="dim")
    return table


def _rows(view: ClusterView) -> Iterator[tuple[str, WorkerView | None]]:
    """(pool, None) for a pool itself, then its workers."""
    pools = dict.fromkeys([*(pool.name for pool in view.pools), *(worker.pool for worker in view.workers)])
    for name in pools:
        yield name, None
        yield from ((name, worker) for worker in view.workers if worker.pool == name)


def _fitting(
    rows: list[tuple[str, WorkerView | None]], room: int | None
) -> tuple[list[tuple[str, WorkerView | None]], int]:
    """All pools, the workers that fit, and the number that do not."""
    if room is None or len(rows) <= room:
        return rows, 0
    workers = room - 1 - sum(worker is None for _, worker in rows)
    shown: list[tuple[str, WorkerView | None]] = []
    left = 0
    for row in rows:
        if row[1] is not None and workers <= 0:
            left += 1
            continue
        workers -= row[1] is not None
        shown.append(row)
    return shown, left


def _pool_cells(name: str, view: ClusterView, rates: Rates, wide: bool) -> list[str | Text]:
    """Sums over the pool's workers."""
    members = [worker for worker in view.workers if worker.pool == name]
    pool = next((pool for pool in view.pools if pool.name == name), None)
    ready = sum(worker.state is WorkerState.READY for worker in members)
    role, wanted = (pool.role.value, pool.wanted) if pool is not None else ("", len(members))
    of = [rates.workers.get(worker.name, WorkerRates()) for worker in members]
    return [name, role, f"{ready} of {wanted}", *_load_cells(members, of, "", wide), *([""] if wide else [])]


def _cells(worker: WorkerView, rate: WorkerRates, traffic: Traffic, wide: bool) -> list[str | Text]:
    state = Text(worker.state.value, style=COLORS[worker.state.value])
    hits = UNKNOWN if rate.hit_share is None else f"{rate.hit_share:.0%}"
    cells = [f" {worker.name}", worker.role.value, state, *_load_cells([worker], [rate], hits, wide)]
    if not wide:
        return cells
    change = f"{traffic.change}, {duration_text(traffic.changed_ns / 1e9)} ago" if traffic.change else ""
    return [*cells, Text(worker.trouble or change)]


def _load_cells(workers: list[WorkerView], rates: list[WorkerRates], hits: str, wide: bool) -> list[str | Text]:
    def total(name: str) -> int:
        return sum(getattr(worker.stats, name) for worker in workers)

    used, of = total("used_blocks"), total("total_blocks")
    load: list[str | Text] = [str(total("running")), str(total("waiting"))]
    load += [_bar(used, of, 12 if wide else 6), _blocks(used, of, wide), hits]
    load += [str(total("reserved")), str(total("leases")), _size_rate(_total(each.bytes_s for each in rates))]
    load.append(_rate(_total(each.tokens_s for each in rates)))
    return [*load, *([_rate(_total(each.steps_s for each in rates))] if wide else [])]


def _blocks(used: int, total: int, wide: bool) -> str:
    if wide:
        return f"{used}/{total}"
    return f"{used / total:.0%}" if total else UNKNOWN


def _bar(used: int, total: int, cells: int) -> Text:
    """The share of blocks in use, with at least one cell if any block is in use."""
    share = used / total if total else 0.0
    full = min(cells, max(1, round(share * cells))) if used else 0
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("#" * full, style), ("." * (cells - full), "dim"))


def _total(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _size_rate(value: float | None) -> str:
    return UNKNOWN if value is None else "0" if not value else size(value)


def duration_text(seconds: float) -> str:
    """3 s, 4m05s, 2h07m, 3d04h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _footer(status: ClusterStatus, width: int) -> Iterator[Text]:
    """Tiers of caches, borrowed memory and problems that have no column, then decisions and events, newest first."""
    for line in [*tier_problems(status.view), *tier_lines(status.view)][:MAX_FOOTER_LINES]:
        yield _line(line)
    for line in islice(loan_lines(status.view), MAX_FOOTER_LINES):
        yield _line(line)
    troubled = [worker for worker in status.view.workers if worker.trouble and width < WIDE]
    for worker in troubled[:MAX_FOOTER_LINES]:
        yield _line(f"{worker.name}: {worker.trouble}")
    entries = [*map(_decision, status.decisions), *_events(status.recent.events)]
    for age_s, text in sorted(entries, key=lambda entry: entry[0])[:MAX_FOOTER_LINES]:
        yield _line(f"{duration_text(age_s):>7} ago  {text}")


def _decision(record: DecisionRecord) -> tuple[float, str]:
    return record.age_s, f"{record.outcome}: {decision_text(record.decision)}: {record.decision.reason}"


def _events(events: tuple[tuple[float, ClusterEvent], ...]) -> Iterator[tuple[float, str]]:
    """One line per event. Refusals with the same cause share a line: the latest one, and their count."""
    causes = Counter(each.text.partition(":")[0] for _, each in events if each.kind == "refused")
    for age_s, each in reversed(events):
        count = causes.pop(each.text.partition(":")[0], 0) if each.kind == "refused" else 1
        if count:
            subject = " ".join(filter(None, (each.worker, each.request_id)))
            more = f" (and {count - 1} more)" if count > 1 else ""
            yield age_s, f"{each.kind}{more}: {subject}{': ' if subject else ''}{each.text}"
