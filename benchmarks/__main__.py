"""The command line: runs parts one after another, shows each, and writes the results."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks import (
    borrowed,
    capacity,
    chats,
    frontend,
    handoff,
    kv_dtypes,
    kv_store,
    loading,
    overhead,
    peer,
    peers_frontend,
    prefix_index,
    routing,
    schemas,
    simulator,
    startup,
    structured,
    tcp_links,
    transfer,
    turns,
)
from benchmarks.control_plane import part as control_plane
from benchmarks.engine import chart, compare, step
from benchmarks.environments import FRONTENDS, PEERS, VLLM
from benchmarks.figures import BenchmarkPart, BenchmarkReport, Progress, report_json
from benchmarks.gang import bubble, reshard, steps
from benchmarks.hosted import refuse_foreign_ray
from benchmarks.peer_simulators import distserve_case, speed
from benchmarks.peer_simulators.sources import DISTSERVE, SPLITWISE, VIDUR
from benchmarks.screen import markdown, show, summary
from cluster.offline.load import machine


@dataclass(frozen=True, slots=True)
class Measurement:
    """One part: `measure(rounds, quick, progress)`, its default number of rounds, and that of `--quick`."""

    measure: Callable[[int, bool, Progress], BenchmarkPart]
    rounds: int
    quick_rounds: int = 1


PARTS = {
    "handoff": Measurement(handoff.measure, handoff.ROUNDS),
    "transfer": Measurement(transfer.measure, transfer.ROUNDS, 3),
    "tcp-links": Measurement(tcp_links.measure, tcp_links.ROUNDS, 3),
    "kv-store": Measurement(kv_store.measure, kv_store.ROUNDS),
    "loading": Measurement(loading.measure, loading.ROUNDS),
    "borrowed": Measurement(borrowed.measure, borrowed.ROUNDS),
    "prefix-index": Measurement(prefix_index.measure, prefix_index.ROUNDS),
    "kv-dtypes": Measurement(kv_dtypes.measure, kv_dtypes.ROUNDS),
    "turns": Measurement(turns.measure, turns.ROUNDS),
    "turns-host": Measurement(turns.measure_host, turns.ROUNDS),
    "chats": Measurement(chats.measure, chats.ROUNDS),
    "overhead": Measurement(overhead.measure, overhead.ROUNDS),
    "frontend": Measurement(frontend.measure, frontend.ROUNDS),
    "capacity": Measurement(capacity.measure, capacity.ROUNDS),
    "peers-frontend": Measurement(peers_frontend.measure, peers_frontend.ROUNDS),
    "structured": Measurement(structured.measure, structured.ROUNDS),
    "schemas": Measurement(schemas.measure, 1),
    "startup": Measurement(startup.measure, startup.ROUNDS),
    "peer": Measurement(peer.measure, peer.ROUNDS),
    "engine": Measurement(compare.measure, compare.ROUNDS),
    "step": Measurement(step.measure, step.ROUNDS),
    "gang-reshard": Measurement(reshard.measure, reshard.ROUNDS),
    "gang-step": Measurement(steps.measure, steps.ROUNDS),
    "gang-bubble": Measurement(bubble.measure, bubble.ROUNDS),
    "control_plane": Measurement(control_plane.measure, control_plane.ROUNDS),
    "routing": Measurement(routing.measure, routing.ROUNDS),
    "simulator": Measurement(simulator.measure, simulator.ROUNDS),
    "peer-simulators": Measurement(speed.measure, speed.ROUNDS),
    "peer-placement": Measurement(distserve_case.measure, distserve_case.ROUNDS),
}
INSTALLS = {"peer-install": PEERS, "peers-frontend-install": FRONTENDS}
GROUPS = {"all": tuple(PARTS), "gang": tuple(name for name in PARTS if name.startswith("gang-"))}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("parts", nargs=-1, type=click.Choice([*GROUPS, *PARTS, *INSTALLS]))
@click.option("--rounds", type=click.IntRange(1, 100), help="Interleaved rounds; each part has its own number.")
@click.option("--quick", is_flag=True, help="Few and short rounds: a smoke test, not figures to quote.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write JSON, Markdown and a chart here.")
@click.option("--peer-venv", type=click.Path(path_type=Path), help="vLLM's environment (DIPTYCH_PEER_VENV).")
@click.option(
    "--schemas",
    "schemas_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of JSON schemas for the part schemas, such as data of JSONSchemaBench (DIPTYCH_SCHEMAS).",
)
@click.option("--vidur", type=click.Path(path_type=Path), help=f"{VIDUR.home} ({VIDUR.variable}).")
@click.option("--distserve", type=click.Path(path_type=Path), help=f"{DISTSERVE.home} ({DISTSERVE.variable}).")
@click.option("--splitwise", type=click.Path(path_type=Path), help=f"{SPLITWISE.home} ({SPLITWISE.variable}).")
@click.option("--debug", is_flag=True, help="Show the traceback of a failed part.")
def main(
    parts: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    json_file: Path | None,
    out: Path | None,
    peer_venv: Path | None,
    schemas_folder: Path | None,
    vidur: Path | None,
    distserve: Path | None,
    splitwise: Path | None,
    debug: bool,
) -> None:
    """Measure Diptych on this machine, every figure beside a peer or a limit of the same run.

    Runs all PARTS by default. The peers, vLLM and llama.cpp, have their own environments, which `peer-install`
    creates; a part whose peer is missing skips it. DIPTYCH_PEER_VENV and DIPTYCH_LLAMA_VENV set other paths.

    \b
    Example:
      python -m benchmarks handoff transfer --rounds 5 --json figures.json
    """
    from rich.console import Console

    _name_folders(
        {
            VLLM.variable: peer_venv,
            schemas.VARIABLE: schemas_folder,
            VIDUR.variable: vidur,
            DISTSERVE.variable: distserve,
            SPLITWISE.variable: splitwise,
        }
    )
    if installs := [part for part in parts if part in INSTALLS]:
        for each in (environment for name in installs for environment in INSTALLS[name]):
            each.install(click.echo)
        parts = tuple(part for part in parts if part not in INSTALLS)
        if not parts:
            return
    try:
        refuse_foreign_ray(dict(os.environ))
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that child processes are ended
    named = {name for part in parts or ("all",) for name in GROUPS.get(part, (part,))}
    wanted = [name for name in PARTS if name in named]
    console = Console(highlight=False, width=None if os.isatty(1) else 200)
    report = _new_report(rounds, quick)
    for name in wanted:
        part = _run(name, rounds, quick, debug)
        show(part, console)
        report = replace(report, parts=(*report.parts, part), load_after=machine.load())
        _write(report, json_file, out)  # after each part: a later one may fail
    if out is not None:
        _draw(report, out)
    console.print(f"\n{summary(report)}")
    if any(part.failed for part in report.parts):
        raise SystemExit(1)


def _name_folders(folders: dict[str, Path | None]) -> None:
    os.environ.update({variable: str(folder) for variable, folder in folders.items() if folder is not None})


def _new_report(rounds: int | None, quick: bool) -> BenchmarkReport:
    load = machine.load()
    return BenchmarkReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine.system_name(),
        cores=len(machine.allowed_cores()),
        cpus=machine.cpu_name(),
        memory_bytes=machine.memory_bytes(),
        load_before=load,
        load_after=load,
        versions=machine.versions(),
        rounds=rounds or 0,
        quick=quick,
        parts=(),
    )


def _run(name: str, rounds: int | None, quick: bool, debug: bool) -> BenchmarkPart:
    """One part. An error is recorded as its result, so the other parts still run."""
    measurement = PARTS[name]
    number = rounds or (measurement.quick_rounds if quick else measurement.rounds)
    begun = time.monotonic()
    try:
        part = measurement.measure(number, quick, lambda line: click.echo(f"{name}: {line}", err=True))
    except Exception as error:
        if debug:
            raise
        part = BenchmarkPart(name, failed=f"{type(error).__name__}: {error}")
    return replace(part, seconds=time.monotonic() - begun)


def _write(report: BenchmarkReport, json_file: Path | None, out: Path | None) -> None:
    if json_file is not None:
        json_file.write_bytes(report_json(report))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{_stem(report)}.json").write_bytes(report_json(report))
        (out / f"{_stem(report)}.md").write_text(markdown(report))


def _stem(report: BenchmarkReport) -> str:
    return f"bench-{report.date[:19].replace(':', '')}"


def _draw(report: BenchmarkReport, out: Path) -> None:
    """The chart of the engine and its peers, beside the tables."""
    for part in report.parts:
        if part.name != "engine" or not part.figures:
            continue
        if reason := chart.missing():
            click.echo(reason, err=True)
            return
        for suffix in ("png", "svg"):
            chart.draw(report, part, out / f"{_stem(report)}-engine.{suffix}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
