"""The campaign's command line."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks.elastic import one, page, pictures, record, staleness
from benchmarks.elastic.campaign import RecordMismatch, measure
from benchmarks.elastic.contenders import COLOCATED, SPLIT, Contender, View, case_of
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.record import Record, Result
from benchmarks.elastic.scenarios import SCENARIOS, ScenarioSize, TraceNotFound, scenario
from benchmarks.elastic.search import TARGET, Job, SearchEffort, searched
from benchmarks.figures import Progress
from cluster.offline.load import machine
from cluster.offline.scoring.figures import slo_text
from cluster.offline.scoring.goodput import Map
from cluster.offline.sim.compare import processes
from cluster.offline.sim.systems import SYSTEMS
from cluster.offline.workload.arrivals import WorkloadError
from cluster.spec import ROUTING, SpecError

PLAIN = {"split": SPLIT, "colocated": COLOCATED}
ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
QUICK = SearchEffort(
    *((0,), (0,), 0.3, 0.3, 0.3, 1),
    systems=("vllm", "distserve"),
    routers=("random", "slo"),
    prompt_chunks=(2048,),
    chunks=(512,),
)
USUAL = ("static", "orca", "vllm", "sarathi", "distserve", "splitwise", "mooncake", "mooncake-predictive")
DEFAULT = SearchEffort(tolerance=0.03, rough=0.15, rung=0.05, finalists=1, systems=USUAL)
AGAIN = {
    "ours": record.OURS,
    "split": record.SPLIT,
    "colocated": record.COLOCATED,
    "system": record.SYSTEM,
    "routers": record.ROUTER,
    "timetable": record.TIMETABLE,
    "per-phase": record.PER_PHASE,
}
FULL = SearchEffort(tolerance=0.03, rough=0.05, rung=0.04, finalists=2)
EFFORTS = {
    "quick": (QUICK, ScenarioSize(workers=2, stretch=0.1), ("phases-a100", "tight-loose")),
    "default": (DEFAULT, ScenarioSize(workers=4), tuple(SCENARIOS)),
    "full": (FULL, ScenarioSize(workers=6, stretch=2.0), tuple(SCENARIOS)),
}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...", type=click.Choice(list(SCENARIOS)))
@click.option("--quick", "effort", flag_value="quick", help="Two workers, seconds: a smoke test.")
@click.option("--default", "effort", flag_value="default", default="default", hidden=True)
@click.option("--full", "effort", flag_value="full", help="All systems, six workers, phases of two minutes; hours.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Write JSON, page and pictures (PNG) here."
)
@click.option("--recorded", is_flag=True, help="Run nothing: page and pictures from the committed record.")
@click.option(
    "--again",
    "again",
    multiple=True,
    type=click.Choice(list(AGAIN)),
    help="Measure only these again, for recorded workloads, and update the record. Repeatable.",
)
@click.option("--stale-only", is_flag=True, help="Only the study of stale statistics; updates the record.")
@click.option(
    "--seeds", type=click.IntRange(1, 16), help="Number of seeds for ours, the static and the per-phase ones. [3]"
)
@click.option("--processes", "count", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--one", "which", type=click.Choice(list(SCENARIOS)), help="One run of this workload, in detail.")
@click.option(
    "--system",
    "who",
    default="ours",
    show_default=True,
    help=f"With --one: {', '.join(SYSTEMS)}; or a static configuration, split:PREFILLS[:CHUNK] or colocated[:CHUNK].",
)
@click.option("--routing", type=click.Choice(ROUTING), help="With --one: this router instead of the system's.")
@click.option("--scale", default=0.6, show_default=True, help="With --one: the load as a share of the fleet's seconds.")
@click.option("--search", is_flag=True, help="With --one: search its goodput from the scale on, with --seeds.")
@click.option("--seed", default=0, show_default=True, help="With --one.")
@click.option("--workers", type=click.IntRange(2, 64), help="[4; with --full and with --one, 6]")
@click.option("--stretch", type=click.FloatRange(0.01, 100.0), help="Factor on the length of all phases. [1]")
@click.option(
    "--stale",
    type=click.FloatRange(0.0, 60.0),
    default=0.0,
    help="With --one: age of workers' statistics at the gateways, in seconds.",
)
@click.option(
    "--gateways",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="With --one: number of gateways.",
)
@click.option("--json", "as_json", is_flag=True, help="With --one: print one line of JSON.")
def main(
    workloads: tuple[str, ...],
    effort: str,
    out: Path | None,
    recorded: bool,
    again: tuple[str, ...],
    stale_only: bool,
    seeds: int | None,
    count: int,
    which: str | None,
    who: str,
    routing: str | None,
    scale: float,
    search: bool,
    seed: int,
    workers: int | None,
    stretch: float | None,
    stale: float,
    gateways: int,
    as_json: bool,
) -> None:
    """Goodput under loads that shift: ours against every system, every static split, colocated, and the best per phase.

    Without WORKLOADS, all of them, which takes hours. Ours and the best static choices alone take about four minutes
    per workload on two cores. Results go into the committed record after each workload, and into
    benchmarks/results/elastic-campaign.md; with --out, only into that folder. An older record there is updated, and
    each figure keeps its date. After a change of Diptych, --again ours takes minutes; where closed forms have changed
    the mix of a workload's requests, it says so, and the whole workload must be measured again.

    For tuning, one run in seconds:

    \b
      python -m benchmarks.elastic --one phases-a100 --system ours --scale 0.6
      python -m benchmarks.elastic --one day --system split:2:2048 --scale 0.5
      python -m benchmarks.elastic --one day --search --workers 4 --seeds 3
    """
    chosen, size, names = EFFORTS[effort]
    size = ScenarioSize() if which else size
    size = ScenarioSize(workers or size.workers, stretch or size.stretch)
    chosen = replace(chosen, seeds=tuple(range(seeds or len(chosen.seeds))))
    try:
        if which is not None:
            made = scenario(which, size)
            probe = ScenarioProbe(replace(contender(who), routing=routing or ""), made, None, View(stale, gateways))
            if search:
                click.echo(_searched(probe, scale, tuple(range(seed, seed + (seeds or 1))), count))
                return
            run = probe.run(scale, seed, trace=True)
            click.echo(one.as_json(run, made, scale) if as_json else "\n".join(one.lines(run, made, scale)))
            return
    except (TraceNotFound, SpecError, WorkloadError) as error:
        raise click.ClickException(str(error)) from None
    if sum((recorded, stale_only, bool(again))) > 1:
        raise click.ClickException("--recorded, --stale-only and --again exclude each other; give one of them")
    file = record.FILE if out is None else out / record.FILE.name
    if recorded and not file.exists():
        raise click.ClickException(f"{file} does not exist; run a campaign first, without --recorded")
    found = record.load(file) if file.exists() else Record()
    if not recorded:
        plan = _Plan(chosen, size, effort, frozenset(AGAIN[each] for each in again))
        wanted = () if stale_only else _wanted(found, workloads, again, names)
        try:
            with _progress(len(wanted) * plan.lines) as progress, processes(count) as each:
                found = _measured(found, file, wanted, plan, each, progress)
                if stale_only or not (workloads or again):
                    dated = (replace(one, date=_today()) for one in staleness.study(size, each, progress))
                    found = replace(found, stale=tuple(dated))
                    record.save(found, file)
        except RecordMismatch as error:
            raise click.ClickException(str(error)) from None
    page.write(out or RESULTS, found, "elastic-{}.png" if out else page.PICTURES)
    if reason := pictures.missing():
        click.echo(reason, err=True)
    else:
        pictures.draw(out or PICTURES, found, "png" if out else "svg")
    click.echo("a quick run is only a smoke test" if effort == "quick" else page.summary(found))


def _searched(probe: ScenarioProbe, scale: float, seeds: tuple[int, ...], count: int) -> str:
    """Its goodput, and the scale of each seed."""
    made = probe.scenario
    job = Job.of(record.OURS, replace(probe, give_up=TARGET), scale * made.rate, seeds, DEFAULT.tolerance)
    with processes(min(count, len(seeds))) as each:
        found = searched((job,), DEFAULT, each, lambda _: None)
    if found.failed:
        raise click.ClickException(found.failed[0])
    (entry,) = found.entries
    scales = ", ".join(f"{held / made.rate:.3f}" for held in entry.by_seed)
    return (
        f"{entry.name} on {made.name}, {made.workers} workers: goodput {entry.rate:.3f} requests/s, "
        f"{entry.rate / case_of(probe.contender, made).gpus:.4f} per GPU, {TARGET:.0%} meet {slo_text(made.slo)}; "
        f"scale by seed: {scales}"
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """How workloads are measured. `kinds`: measure only these contenders; empty: all."""

    effort: SearchEffort
    size: ScenarioSize
    word: str
    kinds: frozenset[str]

    @property
    def lines(self) -> int:
        """Approximate number of progress lines per workload."""
        return 4 if self.kinds else 30 + len(self.effort.systems or SYSTEMS) + len(self.effort.routers)


def _wanted(found: Record, workloads: Sequence[str], again: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """Raises `click.ClickException` when --again names workloads that are not recorded."""
    if not again:
        return workloads or names
    known = [each.scenario for each in found.results]
    if lacking := [name for name in workloads if name not in known] or ([] if known else ["any workload"]):
        raise click.ClickException(f"the record lacks {', '.join(lacking)}; measure it whole first, without --again")
    return workloads or known


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _stamped(result: Result) -> Result:
    """With today's date for what is new, this machine and these versions."""
    versions = machine.versions()
    return result.stamped(
        _today(),
        f"{len(machine.allowed_cores())} cores of {machine.cpu_name()}, {machine.system_name()}",
        ", ".join(f"{name} {versions[name]}" for name in ("python", "diptych", "numpy")),
    )


def _measured(found: Record, file: Path, names: Sequence[str], plan: _Plan, each: Map, progress: Progress) -> Record:
    """Measure, and save after each workload: an interrupted campaign keeps its results. Raises `RecordMismatch`."""
    for number, name in enumerate(names, 1):
        progress(f"workload {number} of {len(names)}: {name}")
        try:
            made = scenario(name, plan.size)
        except TraceNotFound as error:
            progress(f"{name} is left out: {error}")
            found = replace(found, absent=tuple(dict.fromkeys((*found.absent, name))))
            continue
        if plan.kinds:
            known = next(each for each in found.results if each.scenario == name)
            result = replace(measure(made, plan.effort, each, progress, plan.kinds, known), effort=known.effort)
        else:
            result = replace(measure(made, plan.effort, each, progress), effort=plan.word)
        found = found.with_result(_stamped(result))
        record.save(found, file)
    return found


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """Prints lines, on a terminal above a progress bar."""
    if not sys.stderr.isatty():
        yield lambda line: click.echo(line, err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressBar

    with ProgressBar(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("campaign", total=total)

        def progress(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False)
            bar.advance(task)

        yield progress


def contender(text: str) -> Contender:
    """Raises `SpecError`."""
    head, *rest = text.split(":")
    if head not in PLAIN:
        return Contender(text)
    wanted = ("PREFILLS", "CHUNK") if head == "split" else ("CHUNK",)
    if len(rest) > len(wanted) or (head == "split" and not rest) or not all(part.isdecimal() for part in rest):
        raise SpecError(f"{text!r} is not a configuration; write split:2, split:2:2048, colocated or colocated:512")
    numbers = [int(part) for part in rest]
    prefills = numbers.pop(0) if head == "split" else 0
    return Contender(PLAIN[head], prefills, numbers[0] if numbers else 2048 if prefills else 512, plain=True)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.elastic")
