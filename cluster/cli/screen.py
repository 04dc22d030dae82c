"""How answers, hand-offs, ledgers and workers look on a terminal, and as JSON. Knows no cluster and no connection."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cluster.events import Accepted, Completed, Queued
from cluster.observe.ledger import PHASES, LatencyLedger
from diptych.view import ClusterView, GatewayState, PoolView, WorkerState, WorkerView
from kvtransfer.ticket import TransferReport

if TYPE_CHECKING:  # rich costs a tenth of a second that --help must not pay
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 200  # what reads a pipe should get whole rows

PullProgress = Callable[[str, int, int | None], None]


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


def say(line: str) -> None:
    """A line about the work, beside the output that a program may read."""
    click.echo(line, err=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


@contextmanager
def progress_bar() -> Iterator[PullProgress]:
    """A callback (what, done, total) that draws bars on a terminal and writes lines elsewhere."""
    if not sys.stderr.isatty():
        told: set[str] = set()

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in told:
                told.add(what)
                say(what)

        yield tell
        return
    from rich.progress import Progress, TaskID

    with Progress(console=console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        yield draw


def answer_json(text: str, tokens: tuple[int, ...], accepted: Accepted, completed: Completed) -> dict[str, Any]:
    ledger = completed.ledger
    return {
        "request_id": accepted.request_id,
        "text": text,
        "tokens": list(tokens),
        "finish": completed.finish.value,
        "prompt_tokens": completed.prompt_tokens,
        "completion_tokens": completed.completion_tokens,
        "cached_tokens": completed.cached_tokens,
        "attempts": completed.attempts,
        "prefill_worker": accepted.prefill_worker,
        "decode_worker": accepted.decode_worker,
        "decode_workers": list(completed.decode_workers or (accepted.decode_worker,)),
        "reason": accepted.reason,
        "predicted_ttft_s": accepted.predicted_ttft_s,
        "predicted_tpot_s": accepted.predicted_tpot_s,
        "ttft_s": ledger.ttft_ns / 1e9,
        "total_s": ledger.total_ns / 1e9,
        "ledger_s": {
            "first": {phase: ns / 1e9 for phase, ns in ledger.first},
            "rest": {phase: ns / 1e9 for phase, ns in ledger.rest},
        },
        "transfers": [asdict(report) for report in completed.transfers],
    }


def worker_json(worker: WorkerView) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(worker)
    return told


def view_json(view: ClusterView) -> dict[str, Any]:
    return {
        "name": view.name,
        "revision": view.revision,
        "model": None if view.model is None else asdict(view.model),
        "workers": [worker_json(worker) for worker in view.workers],
        "links": [asdict(link) for link in view.links],
        "pools": [msgspec.to_builtins(pool) for pool in view.pools],
        "served_gateways": [msgspec.to_builtins(each) for each in view.served_gateways],
        "failures": [asdict(each) for each in view.failures],
    }


def ledger_table(ledger: LatencyLedger) -> "Table":
    """One row for each phase; the columns add up to TTFT, to what came after, and to the total."""
    first, rest = dict(ledger.first), dict(ledger.rest)
    table = plain_table("phase", ">to first token", ">after it", ">together")
    for phase in PHASES:
        if phase in first or phase in rest:
            both = first.get(phase, 0) + rest.get(phase, 0)
            table.add_row(phase, _ms(first.get(phase)), _ms(rest.get(phase)), _ms(both))
    table.add_section()
    table.add_row("sum", _ms(sum(first.values())), _ms(sum(rest.values())), _ms(ledger.total_ns), style="bold")
    return table


def _ms(ns: int | None) -> str:
    return "" if ns is None else f"{ns / 1e6:.3f} ms"


def queued_line(event: Queued) -> str:
    """Why there is nothing yet, and when there should be."""
    ahead = f"behind {event.position} others" if event.position else "next in turn"
    start, first = f"{event.predicted_start_s:.1f} s", f"{event.predicted_ttft_s:.1f} s"
    return f"queued {ahead} ({event.reason}); its turn should come in {start}, the first token {first} after it came"


def way_lines(accepted: Accepted, completed: Completed, workers: dict[str, WorkerView]) -> list[str]:
    """Where a request went, in a few lines."""

    def named(name: str) -> str:
        worker = workers.get(name)
        return name if worker is None else f"{name} (pid {worker.pid}, {worker.node or 'this machine'})"

    lines = [f"prefill   {named(accepted.prefill_worker)}", f"decode    {named(accepted.decode_worker)}"]
    lines += [f"moved to  {named(name)}" for name in completed.decode_workers[1:]]
    if accepted.reason:
        lines.append(f"chosen    {accepted.reason}")
    if accepted.predicted_ttft_s is not None:
        tpot_s = accepted.predicted_tpot_s
        later = "" if tpot_s is None else f", {tpot_s * 1e3:.1f} ms for each token behind it"
        lines.append(f"predicted first token after {accepted.predicted_ttft_s * 1e3:.1f} ms{later}")
    if not completed.transfers:
        lines.append("hand-off  none: one worker did both phases")
    for report in completed.transfers:
        lines += _hand_off_lines(report, completed.ledger)
    tokens = f"{completed.prompt_tokens} in ({completed.cached_tokens} cached), {completed.completion_tokens} out"
    lines.append(f"tokens    {tokens}, finish {completed.finish.value}, attempts {completed.attempts}")
    return lines


def _hand_off_lines(report: TransferReport, ledger: LatencyLedger) -> list[str]:
    waited_s = (dict(ledger.first).get("transfer_wait", 0) + dict(ledger.rest).get("transfer_wait", 0)) / 1e9
    hidden_s = max(0.0, report.elapsed_s - waited_s)
    moved = f"{report.num_blocks} blocks, {size(report.num_bytes)}"
    return [
        f"hand-off  {report.transport}, {report.path}, lease {report.lease}",
        f"moved     {moved} in {report.num_reads} reads of {report.num_descriptors} ranges; "
        f"{report.reused_blocks} blocks were there already",
        f"checked   {report.digests_verified} digests verified in {report.digest_s * 1e3:.2f} ms",
        f"overlap   pull {report.elapsed_s * 1e3:.2f} ms (bytes in flight {report.busy_s * 1e3:.2f} ms), "
        f"{hidden_s * 1e3:.2f} ms of it while the prompt was still computed",
    ]


def workers_table(view: ClusterView) -> "Table":
    """Columns of ranks stand only where a worker has several, that of restarts where there were any."""
    headers = ["worker", "role", "state", "pid", "node", ">running", ">waiting", ">queued", ">blocks free", ">step"]
    in_gangs = any(worker.parallel.world_size > 1 for worker in view.workers)
    restarted = any(worker.restarts for worker in view.workers)
    more = [*([">TP x PP", ">bubble"] if in_gangs else []), *([">restarts"] if restarted else [])]
    table = plain_table(*headers, *more, "detail")
    colours = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}
    for worker in view.workers:
        stats, state = worker.stats, worker.state.value
        table.add_row(
            worker.name,
            _role(worker, view),
            f"[{colours[state]}]{state}[/]",
            str(worker.pid or ""),
            worker.node,
            str(stats.running),
            str(stats.waiting),
            f"{stats.queued_tokens} tok",
            f"{stats.free_blocks}/{stats.total_blocks}",
            f"{stats.step_s * 1e3:.1f} ms",
            *([_ranks(worker), _bubble(worker)] if in_gangs else []),
            *([str(worker.restarts)] if restarted else []),
            worker.trouble,
        )
    return table


def _role(worker: WorkerView, view: ClusterView) -> str:
    """With its pool's, where they differ."""
    pool = next((pool for pool in view.pools if pool.name == worker.pool), None)
    if pool is None or pool.role is worker.role:
        return worker.role.value
    return f"{worker.role.value} (pool: {pool.role.value})"


def _ranks(worker: WorkerView) -> str:
    return f"{worker.parallel.tensor} x {worker.parallel.pipeline}"


def _bubble(worker: WorkerView) -> str:
    return f"{worker.stats.bubble_share:.0%}" if worker.parallel.pipeline > 1 else ""


def links_table(view: ClusterView) -> "Table":
    table = plain_table("owner", "reader", "transport", "path", ">latency", ">bandwidth", "not taken")
    for link in view.links:
        speed = f"{link.bytes_per_s / 1e9:.2f} GB/s"
        latency = f"{link.latency_s * 1e6:.0f} us"
        table.add_row(link.owner, link.reader, link.transport, link.path, latency, speed, "; ".join(link.skipped))
    return table


def trouble_lines(view: ClusterView) -> list[str]:
    """What is or was wrong beside the workers; nothing where all is well."""
    lines = [
        f"pool {pool.name} has no ready worker: others serve its requests"
        for pool in view.pools
        if _is_empty(pool, view)
    ]
    for each in view.served_gateways:
        counts = ", ".join(
            f"{count} {word}{'s' * (count != 1)}"
            for count, word in ((each.restarts, "restart"), (each.silences, "silence"))
            if count
        )
        if counts or each.state is not GatewayState.OPEN:
            told = "; ".join(filter(None, (each.detail, counts)))
            lines.append(f"{each.name} is {each.state.value}: {told}")
    for failed in view.failures:
        times = f"{failed.count} time{'s' * (failed.count != 1)}"
        lines.append(f"{failed.process}: {failed.task} failed {times} and went on; its log says why")
    return lines


def _is_empty(pool: PoolView, view: ClusterView) -> bool:
    staff = (worker for worker in view.workers if worker.pool == pool.name)
    return pool.wanted > 0 and not any(worker.state is WorkerState.READY for worker in staff)


def size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def plain_table(*headers: str) -> "Table":
    """Headers that begin with ">" stand, like their columns, on the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left", overflow="fold")
    return table
