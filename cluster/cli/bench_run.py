"""The measurements of `diptych bench`, their tables and their output folder.

Imported when the command runs, so heavy imports are at the top.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from cluster.cli.comparison import positive_slo, print_comparison, write_report
from cluster.cli.lifetime import run
from cluster.cli.screen import PullProgress, console, print_json, progress_bar, say
from cluster.offline.load.endpoint import Endpoint, Target
from cluster.offline.load.goodput_search import GoodputQuery, search
from cluster.offline.load.machine import MeasurementInfo, measurement_info
from cluster.offline.load.sender import LoadOptions
from cluster.offline.load.trials import TrialPlan, configuration_of, external, kind_of, open_endpoint, run_trials
from cluster.offline.report.html import ExtraContent, Picture
from cluster.offline.report.table import SystemResult, probes, terminal
from cluster.offline.report.trials import has_verdicts, summary_lines, trial_intervals, trial_tables, verdict_map
from cluster.offline.scoring.figures import figures, slo_text
from cluster.offline.scoring.goodput import Goodput
from cluster.offline.scoring.records import Run
from cluster.offline.scoring.trials import SeedRun, Trials
from cluster.offline.workload.arrivals import Workload
from diptych.access import Access
from workers.request import SLO

SEEDS = {"load": 1, "goodput": 3, "compare": 5}  # by default


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of the command line. Raises `click.UsageError` if they exclude each other."""

    mode: Literal["load", "goodput", "compare"]
    endpoint: str
    access: Access
    model: str
    api_key: str
    tokenizer: Path | None
    workload: str
    concurrency: int | None
    target: float
    tolerance: float
    rates: str | None
    ttft_s: float | None
    tpot_s: float | None
    deadline_s: float
    in_flight: int
    seed: int
    seeds: int | None
    out: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        if self.concurrency is not None and (self.mode == "goodput" or self.rates is not None):
            raise click.UsageError("--concurrency has no rate; leave --goodput and --rates out")
        if self.seeds is not None and self.mode == "load":
            raise click.UsageError("--seeds goes with --goodput or --compare; a single run has --seed")
        if self.mode == "goodput" and self.slo == SLO():
            raise click.UsageError("--goodput needs an SLO: --ttft, --tpot, or both")
        _ = self.all_rates

    @property
    def slo(self) -> SLO:
        return positive_slo(self.ttft_s, self.tpot_s)

    @property
    def all_rates(self) -> tuple[float, ...]:
        return rates_of(self.rates)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + (self.seeds or SEEDS[self.mode])))

    def target_at(self, address: str) -> Target:
        return Target(address, self.model, self.api_key, self.tokenizer, self.access)

    def load(self, endpoint: Endpoint, seed: int) -> LoadOptions:
        return LoadOptions(
            endpoint.vocab_size, self.deadline_s, self.in_flight, seed, self.slo, endpoint.name, self.concurrency
        )


def measure(options: BenchOptions) -> None:
    """Run one workload, then its further rates, then the goodput search if requested."""
    seed = options.seed
    query = GoodputQuery(options.workload, options.slo, options.target, options.all_seeds, options.tolerance)
    first = query.at(None, seed, 0)
    if options.mode == "goodput":
        _ = query.start  # raises before anything is sent
    with _driver(options) as (drive, here):
        run = drive(first, seed)
        sweep = []
        for turn, rate in enumerate(options.all_rates, 1):
            sweep.append(figures(drive(query.at(rate, seed, turn), seed, f"at {rate:g} requests/s"), options.slo))
        goodputs: tuple[Goodput, ...] = ()
        if options.mode == "goodput":
            say(f"searching goodput, seeds {', '.join(map(str, query.seeds))} to within {query.tolerance:.0%}")
            goodputs = (search(query, drive, run.gpus, say),)
    compared = [SystemResult(run.system, figures(run, options.slo), goodputs, tuple(sweep), run)]
    if not options.as_json:
        print_comparison(compared, as_json=False)
        for reason, count in compared[0].figures.reasons:
            say(f"{count} requests did not finish: {reason}")
    extra = ExtraContent(grids=(probes(compared),)) if goodputs else ExtraContent()
    _finish(options, here, compared, {}, extra)


Drive = Callable[..., Run]  # (workload, seed, text of the progress bar)


@contextmanager
def _driver(options: BenchOptions) -> Iterator[tuple[Drive, MeasurementInfo]]:
    """Opens the endpoint. The function runs one workload on it, with a progress bar."""
    with asyncio.Runner() as runner, progress_bar() as bar:
        stack = AsyncExitStack()
        endpoint = runner.run(stack.enter_async_context(open_endpoint(options.target_at(options.endpoint))))

        def drive(workload: Workload, seed: int, what: str = "requests finished") -> Run:
            ended = _counter(bar, what, len(workload.arrivals))
            return runner.run(endpoint.drive(workload, options.load(endpoint, seed), ended))

        try:
            say(f"load on {endpoint.description}")
            yield drive, measurement_info([endpoint.description], options.all_seeds)
        finally:
            runner.run(stack.aclose())


def _counter(bar: PullProgress, what: str, total: int) -> Callable[[], None]:
    """A function that advances the bar by one request."""
    ended = 0
    bar(what, ended, total)

    def advance() -> None:
        nonlocal ended
        ended += 1
        bar(what, ended, total)

    return advance


def compare_configurations(options: BenchOptions, given: Sequence[str], runtime: str, *, resume: bool) -> None:
    """Run the same load on several configurations, which are started here one after another.

    `resume`: runs that the output folder has are kept and not run again.
    """
    configurations = [
        external(each, options.target_at(kind_of(each)[1])) if "://" in each else configuration_of(each)
        for each in given
    ]
    names = [each.name for each in configurations]
    if len(set(names)) != len(names):
        raise click.UsageError(f"two of {', '.join(names)} have the same name; rename one")
    rates, seeds = options.all_rates or (None,), options.all_seeds
    plan = TrialPlan(options.workload, rates, seeds, runtime, options.access, options.concurrency)
    for rate in plan.rates:
        plan.workload(rate, options.seed)  # raises before anything is started
    here = measurement_info([each.description for each in configurations], options.all_seeds)
    if here.is_busy:
        say(f"load {here.load_before[0]:.1f} on {here.cores} cores: this machine is busy, do not quote these figures")
    file = None if options.out is None else options.out / "runs.jsonl"
    kept = _kept_runs(file, options) if file is not None and resume else []
    known = {(each.configuration, each.load, each.seed): each for each in kept}
    wanted = [(name, plan.load_name(rate), seed) for seed in seeds for name in names for rate in rates]
    with progress_bar() as bar:
        progress = _TrialProgress(bar, sum(each not in known for each in wanted), file, options, kept)
        trials, firsts = run(run_trials(configurations, plan, options.load, progress, known))
    found = Trials(sorted([*kept, *trials], key=partial(_place, names, [plan.load_name(rate) for rate in rates])))
    shown = {each.configuration: each.figures for each in reversed(found.all)}
    shown |= {name: figures(each, options.slo) for name, each in firsts.items()}
    compared = [SystemResult(name, shown[name], run=firsts.get(name)) for name in found.configurations]
    tables, lines = tuple(trial_tables(found)), tuple(summary_lines(found))
    if not options.as_json:
        for table in tables:
            console().print(terminal(table))
        for line in lines:
            console().print(line, markup=False)
    pictures = [Picture("compared", "Means and 95 % confidence intervals.", partial(trial_intervals, found))]
    if has_verdicts(found):
        caption = "Where each wins and loses against the best colocated configuration by that figure."
        pictures.insert(0, Picture("verdicts", caption, partial(verdict_map, found)))
    note = "Tables of systems and pictures of requests show one run of each configuration only."
    document = {"runs": [_run_json(each) for each in found.all], "summary": list(lines)}
    _finish(options, here, compared, document, ExtraContent(lines, tables, tuple(pictures)), note)


class _TrialProgress:
    """On a terminal a bar for all runs and one per configuration, elsewhere lines per run.

    Appends each run's figures to the file when it ends, so that a later failure does not lose them.
    """

    def __init__(
        self, bar: PullProgress, runs: int, file: Path | None, options: BenchOptions, kept: Sequence[SeedRun]
    ) -> None:
        self._file = file
        self._options = options
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text("".join(map(self._line, kept)))
            new.replace(file)
        self._bar = bar
        self._runs = runs
        self._begun = 0
        self._is_terminal = sys.stderr.isatty()

    def starts(self, name: str) -> None:
        if not self._is_terminal:
            say(f"starting {name}")

    def runs(self, name: str, what: str, requests: int) -> Callable[[], None]:
        if self._is_terminal:
            self._bar("runs", self._begun, self._runs)
        self._begun += 1
        return _counter(self._bar, name if self._is_terminal else f"{name}, {what}", requests)

    def ran(self, trial: SeedRun) -> None:
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(self._line(trial))

    def _line(self, trial: SeedRun) -> str:
        return json.dumps({"workload": self._options.workload, **_run_json(trial)}) + "\n"


def _kept_runs(file: Path, options: BenchOptions) -> list[SeedRun]:
    """The runs that an earlier comparison of this load wrote; a last line that was cut off is left out.

    Raises `click.UsageError` for runs of another load or SLO.
    """
    kept = []
    for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
        if not line.endswith("\n"):
            break
        found = json.loads(line)
        trial = msgspec.convert(found, SeedRun)
        if (found["workload"], trial.figures.slo) != (options.workload, options.slo):
            other = f"{found['workload']} with {slo_text(trial.figures.slo)}"
            raise click.UsageError(f"{file} has runs of {other}; choose another --out, or leave --resume out")
        kept.append(trial)
    return kept


def _place(names: Sequence[str], loads: Sequence[str], trial: SeedRun) -> tuple[bool, int, bool, int, int]:
    """Where a run stands in the report: as given on the command line, and others that were kept behind."""
    name, load = trial.configuration, trial.load
    return (
        *(name not in names, names.index(name) if name in names else 0),
        *(load not in loads, loads.index(load) if load in loads else 0),
        trial.seed,
    )


def _run_json(trial: SeedRun) -> dict[str, Any]:
    written: dict[str, Any] = msgspec.to_builtins(trial)
    return written | {"figures": trial.figures.as_json()}


def _finish(
    options: BenchOptions,
    about: MeasurementInfo,
    compared: Sequence[SystemResult],
    results: dict[str, Any],
    extra: ExtraContent,
    note: str = "",
) -> None:
    """Print the JSON and write the folder, if requested. The page has the `note`."""
    document = {"about": asdict(about), "systems": [each.as_json() for each in compared], **results}
    if options.as_json:
        print_json(document)
    if options.out is not None:
        notes = (*about.lines, *filter(None, [note]))
        write_report(compared, options.out, "Benchmark", options.workload, document=document, notes=notes, extra=extra)


def rates_of(text: str | None) -> tuple[float, ...]:
    """`1,2,4` as ascending rates; None: no rates."""
    try:
        rates = tuple(sorted({float(each) for each in (text or "").split(",") if each.strip()}))
    except ValueError:
        raise click.UsageError(f"--rates is {text!r}; it is numbers with commas, such as 1,2,4") from None
    if any(not 0.0 < rate < float("inf") for rate in rates):
        raise click.UsageError(f"--rates is {text!r}; every rate is above 0 requests a second")
    return rates
