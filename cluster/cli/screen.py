"""Prints answers, KV handoffs, ledgers, workers, pools and decisions on a terminal or as JSON. Opens no connection."""

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec

from diptych.view import ClusterView, Decision, DecisionRecord, GatewayState, PoolView, WorkerState, WorkerView

if TYPE_CHECKING:  # importing rich takes a tenth of a second, which --help must not need
    from rich.console import Console
    from rich.table import Table

    from cluster.events import Accepted, Completed, Queued
    from cluster.observe.ledger import LatencyLedger
    from diptych.client import Answer
    from diptych.slo import ClassScore
    from kvtransfer.ticket import TransferReport

PIPE_WIDTH = 200  # so that rows are not wrapped in a pipe
MAX_PAIRS = 8  # unlinked ones shown
COLORS = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}
LINE_S = 3.0  # between lines of progress where there is no terminal

PullProgress = Callable[[str, int, int | None], None]


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


def say(line: str) -> None:
    """Print a line on stderr; stdout is for output that a program may read."""
    click.echo(line, err=True)


def print_lines(lines: Iterable[str]) -> None:
    """On a terminal, break long lines at its width, with a hanging indent; in a pipe, print them as they are."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    click.echo("\n".join(hanging(line, width) for line in lines))
    sys.stdout.flush()


def hanging(line: str, width: int) -> str:
    """The line in pieces of at most `width` columns, the later ones indented further; as it is with width 0."""
    if not width or len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(),
        max(width, len(indent) + 24),
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


@contextmanager
def progress_bar() -> Iterator[PullProgress]:
    """A callback (what, done, total) that draws a bar per `what` on a terminal. Elsewhere it prints a line at the
    beginning and the end of each `what`, and every few seconds in between.
    """
    if not sys.stderr.isatty():
        yield ProgressLines().update
        return
    from rich.progress import Progress, TaskID

    with Progress(console=console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        yield draw


class ProgressLines:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s: dict[str, float] = {}

    def update(self, what: str, done: int, total: int | None) -> None:
        now_s = self._clock()
        due_s = self._due_s.get(what)
        if due_s is None:
            say(what)
        elif now_s < due_s and done != total:
            return
        elif total is None:
            say(f"{what}: {done}")
        else:
            say(f"{what}: {done} of {total} ({done / max(1, total):.0%})")
        self._due_s[what] = now_s + LINE_S


def answer_json(answer: "Answer") -> dict[str, Any]:
    accepted, completed, ledger = answer.accepted, answer.completed, answer.completed.ledger
    routed = ("request_id", "prefill_worker", "decode_worker", "reason", "predicted_ttft_s", "predicted_tpot_s")
    counted = ("prompt_tokens", "completion_tokens", "cached_tokens", "attempts")
    return {
        "text": answer.text,
        "tokens": list(answer.output.tokens),
        "finish": completed.finish.value,
        **{name: getattr(accepted, name) for name in routed},
        **{name: getattr(completed, name) for name in counted},
        "decode_workers": list(completed.decode_workers or (accepted.decode_worker,)),
        "ttft_s": ledger.ttft_ns / 1e9,
        "total_s": ledger.total_ns / 1e9,
        "ledger_s": {
            name: {phase: ns / 1e9 for phase, ns in part}
            for name, part in (("first", ledger.first), ("rest", ledger.rest))
        },
        "transfers": [asdict(report) for report in completed.transfers],
        **({} if answer.queued is None else {"queued": asdict(answer.queued)}),
    }


def view_json(view: ClusterView) -> dict[str, Any]:
    shown = ("name", "revision", "model", "workers", "links", "pools", "served_gateways", "failures", "other_models")
    return {name: msgspec.to_builtins(getattr(view, name)) for name in (*shown, "adapters")} | {
        "unlinked": sorted(view.unlinked)
    }


def print_report(screen: "Console", answer: "Answer", view: ClusterView) -> None:
    """Where the request ran, and where its time went."""
    workers = {worker.name: worker for worker in view.workers}
    screen.print("\n[bold]Placement and transfer[/]")
    for line in route_lines(answer.accepted, answer.completed, workers):
        screen.print(line, markup=False, soft_wrap=True)
    screen.print("\n[bold]Latency by phase[/]")
    screen.print(ledger_table(answer.completed.ledger))


def ledger_table(ledger: "LatencyLedger") -> "Table":
    """One row per phase. The columns sum to TTFT, to the time after it, and to the total."""
    from cluster.observe.ledger import PHASES

    first, rest = dict(ledger.first), dict(ledger.rest)
    table = plain_table("phase", ">to first token", ">after it", ">total")
    for phase in PHASES:
        if phase in first or phase in rest:
            both = first.get(phase, 0) + rest.get(phase, 0)
            table.add_row(phase, _ms(first.get(phase)), _ms(rest.get(phase)), _ms(both))
    table.add_section()
    table.add_row("sum", _ms(sum(first.values())), _ms(sum(rest.values())), _ms(ledger.total_ns), style="bold")
    return table


def _ms(ns: int | None) -> str:
    return "" if ns is None else f"{ns / 1e6:.3f} ms"


def queued_line(event: "Queued") -> str:
    """The reason for the wait, and the predicted times."""
    ahead = f"behind {event.position} others" if event.position else "next in line"
    start, first = f"{event.predicted_start_s:.1f} s", f"{event.predicted_ttft_s:.1f} s"
    return f"queued {ahead} ({event.reason}); expected to start in {start}, with a TTFT of {first}"


def route_lines(accepted: "Accepted", completed: "Completed", workers: dict[str, WorkerView]) -> list[str]:
    """The workers of a request, its KV handoffs, and its token counts."""

    def named(name: str) -> str:
        worker = workers.get(name)
        return name if worker is None else f"{name} (pid {worker.pid}, {worker.node or 'this machine'})"

    lines = [f"prefill   {named(accepted.prefill_worker)}", f"decode    {named(accepted.decode_worker)}"]
    lines += [f"moved to  {named(name)}" for name in completed.decode_workers[1:]]
    if accepted.reason:
        lines.append(f"chosen    {accepted.reason}")
    if accepted.predicted_ttft_s is not None:
        tpot_s = accepted.predicted_tpot_s
        later = "" if tpot_s is None else f", then {tpot_s * 1e3:.1f} ms per token"
        lines.append(f"predicted TTFT {accepted.predicted_ttft_s * 1e3:.1f} ms{later}")
    if not completed.transfers:
        lines.append("handoff   none: one worker ran both phases")
    for report in completed.transfers:
        lines += _handoff_lines(report, completed.ledger)
    tokens = f"{completed.prompt_tokens} in ({completed.cached_tokens} cached), {completed.completion_tokens} out"
    lines.append(f"tokens    {tokens}, finish {completed.finish.value}, attempts {completed.attempts}")
    return lines


def _handoff_lines(report: "TransferReport", ledger: "LatencyLedger") -> list[str]:
    waited_s = (dict(ledger.first).get("transfer_wait", 0) + dict(ledger.rest).get("transfer_wait", 0)) / 1e9
    hidden_s = max(0.0, report.elapsed_s - waited_s)
    moved = f"{report.num_blocks} blocks, {size(report.num_bytes)}"
    return [
        f"handoff   {report.transport}, {report.path}, lease {report.lease}",
        f"moved     {moved}, reads: {report.num_reads}, ranges: {report.num_descriptors}; "
        f"blocks already cached there: {report.reused_blocks}",
        f"verified  {report.digests_verified} digests in {report.digest_s * 1e3:.2f} ms",
        f"overlap   pull {report.elapsed_s * 1e3:.2f} ms (reading {report.busy_s * 1e3:.2f} ms), "
        f"{hidden_s * 1e3:.2f} ms of it during prefill",
    ]


def workers_table(view: ClusterView) -> "Table":
    """Has columns for ranks and restarts only if a worker has any."""
    headers = ["worker", "role", "state", "pid", "node", ">running", ">waiting", ">queued", ">blocks free", ">step"]
    in_gangs = any(worker.parallel.world_size > 1 for worker in view.workers)
    restarted = any(worker.restarts for worker in view.workers)
    more = [*([">TP x PP", ">bubble"] if in_gangs else []), *([">restarts"] if restarted else [])]
    table = plain_table(*headers, *more, "detail")
    for worker in view.workers:
        state = worker.state.value
        table.add_row(
            worker.name,
            _role(worker, view),
            f"[{COLORS[state]}]{state}[/]",
            *_process(worker),
            *([_ranks(worker), _bubble(worker)] if in_gangs else []),
            *([str(worker.restarts)] if restarted else []),
            _detail(worker),
        )
    return table


def _process(worker: WorkerView) -> tuple[str, ...]:
    """Cells of `workers_table` about its process; empty while it has none or is new."""
    stats = worker.stats
    if not stats.total_blocks:
        return ("", worker.node, *("",) * 5)
    load = f"{stats.queued_tokens} tok", f"{stats.free_blocks}/{stats.total_blocks}", f"{stats.step_s * 1e3:.1f} ms"
    return str(worker.pid or ""), worker.node, str(stats.running), str(stats.waiting), *load


def _detail(worker: WorkerView) -> str:
    is_away = worker.state in (WorkerState.DEAD, WorkerState.STARTING) and worker.age_s >= 1.0
    return "; ".join(filter(None, (worker.trouble, f"last heard from {worker.age_s:.0f} s ago" if is_away else "")))


def _role(worker: WorkerView, view: ClusterView) -> str:
    """The worker's role, and its pool's if that differs."""
    pool = next((pool for pool in view.pools if pool.name == worker.pool), None)
    if pool is None or pool.role is worker.role:
        return worker.role.value
    return f"{worker.role.value} (pool: {pool.role.value})"


def _ranks(worker: WorkerView) -> str:
    return f"{worker.parallel.tensor} x {worker.parallel.pipeline}"


def _bubble(worker: WorkerView) -> str:
    return f"{worker.stats.bubble_share:.0%}" if worker.parallel.pipeline > 1 else ""


def named_class(score: "ClassScore") -> str:
    """The class, and the model where there are several."""
    return f"{score.name} of {score.model}" if score.model else score.name


def models_text(view: ClusterView) -> str:
    """With the adapters that requests may name."""
    names = ", ".join(model.name for model in view.models) or "not loaded yet"
    text = f"models {names}" if len(view.models) > 1 else f"model {names}"
    return f"{text}, adapters {', '.join(each.name for each in view.adapters)}" if view.adapters else text


def pools_table(view: ClusterView) -> "Table":
    """Only elastic pools have a minimum and a maximum. Of several models, with the model of each pool."""
    from rich.markup import escape

    names_models = len(view.models) > 1
    table = plain_table("pool", *(["model"] if names_models else []), "role", ">ready", ">target", ">min", ">max")
    for pool in view.pools:
        workers = (worker for worker in view.workers if worker.pool == pool.name)
        ready = sum(worker.state is WorkerState.READY for worker in workers)
        bounds = (pool.min_replicas, pool.max_replicas) if pool.min_replicas < pool.max_replicas else ("-", "-")
        model = [escape(pool.model)] if names_models else []
        table.add_row(pool.name, *model, pool.role.value, *map(str, (ready, pool.wanted, *bounds)))
    return table


def decisions_table(decisions: Iterable[DecisionRecord]) -> "Table":
    """The latest decision first."""
    from rich.markup import escape

    table = plain_table(">age", "decision", "outcome", "reason")
    for record in reversed(tuple(decisions)):
        texts = decision_text(record.decision), record.outcome, record.decision.reason
        table.add_row(f"{record.age_s:.0f} s", *map(escape, texts))
    return table


def decision_text(decision: Decision) -> str:
    if decision.kind == "flip":
        return f"{decision.worker} -> {decision.role.value if decision.role else '?'}"
    return f"grow {decision.pool}" if decision.kind == "grow" else f"shrink {decision.pool}: {decision.worker}"


def decision_json(record: DecisionRecord) -> dict[str, Any]:
    decision: dict[str, Any] = msgspec.to_builtins(record.decision)
    return decision | {"age_s": record.age_s, "outcome": record.outcome}


def links_table(view: ClusterView) -> "Table":
    table = plain_table("owner", "reader", "transport", "path", ">latency", ">bandwidth", "skipped")
    for link in view.links:
        speed = f"{link.bytes_per_s / 1e9:.2f} GB/s"
        latency = f"{link.latency_s * 1e6:.0f} us"
        table.add_row(link.owner, link.reader, link.transport, link.path, latency, speed, "; ".join(link.skipped))
    return table


def problem_lines(view: ClusterView) -> list[str]:
    """Problems of pools, pairs, gateways and background tasks. The table of workers has their problems."""
    lines = [
        f"pool {pool.name} has no ready worker: other pools serve its requests"
        for pool in view.pools
        if _is_empty(pool, view)
    ]
    pairs = sorted(view.unlinked)
    lines += [f"no KV can move from {owner} to {reader}; preflight will retry" for owner, reader in pairs[:MAX_PAIRS]]
    if len(pairs) > MAX_PAIRS:
        lines.append(f"the same holds for {len(pairs) - MAX_PAIRS} further pairs")
    for each in view.served_gateways:
        counts = ", ".join(
            f"{count} {word}{'s' * (count != 1)}"
            for count, word in ((each.restarts, "restart"), (each.silences, "missed health check"))
            if count
        )
        if counts or each.state is not GatewayState.OPEN:
            detail = "; ".join(filter(None, (each.detail, counts)))
            lines.append(f"{each.name} is {each.state.value}: {detail}")
    for failed in view.failures:
        times = f"{failed.count} time{'s' * (failed.count != 1)}"
        lines.append(f"{failed.process}: {failed.task} failed {times} and continued; see its log")
    return lines


def _is_empty(pool: PoolView, view: ClusterView) -> bool:
    members = (worker for worker in view.workers if worker.pool == pool.name)
    return pool.wanted > 0 and not any(worker.state is WorkerState.READY for worker in members)


def size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def plain_table(*headers: str) -> "Table":
    """A column whose header starts with ">" is right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left", overflow="fold")
    return table
