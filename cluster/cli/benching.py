"""What `diptych bench` does once its options are checked: each kind of measurement, its tables and its folder."""

import asyncio
import json
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cluster.cli.comparison import print_comparison, system_json, write_report
from cluster.cli.lifetime import run
from cluster.cli.screen import console, print_json, progress_bar, say
from diptych.access import Access

if TYPE_CHECKING:
    from cluster.cli.screen import PullProgress
    from cluster.offline.load.about import About
    from cluster.offline.load.endpoint import Endpoint, Target
    from cluster.offline.load.searching import GoodputQuery
    from cluster.offline.load.sending import Ended, LoadOptions
    from cluster.offline.report.compared import Compared
    from cluster.offline.report.html import More
    from cluster.offline.scoring.goodput import Goodput
    from cluster.offline.scoring.records import Run
    from cluster.offline.scoring.trials import SeedRun, Trials
    from cluster.offline.workload.arrivals import Workload
    from workers.request import SLO

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What all kinds have in common, checked. `target`: None where configurations are compared."""

    target: "Target | None"
    source: str
    concurrency: int | None
    slo: "SLO"
    deadline_s: float
    in_flight: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    out: Path | None
    as_json: bool
    access: Access

    def load(self, endpoint: "Endpoint", seed: int) -> "LoadOptions":
        from cluster.offline.load.sending import LoadOptions

        return LoadOptions(
            endpoint.vocab_size, self.deadline_s, self.in_flight, seed, self.slo, endpoint.name, self.concurrency
        )


@dataclass(frozen=True, slots=True)
class Goal:
    """Of a search for goodput."""

    target: float
    tolerance: float


class _Driver:
    """Runs at one endpoint, one after another, with a bar for each."""

    def __init__(self, runner: asyncio.Runner, endpoint: "Endpoint", asked: BenchOptions, bar: "PullProgress") -> None:
        self._runner = runner
        self.endpoint = endpoint
        self._asked = asked
        self._bar = bar

    def __call__(self, workload: "Workload", seed: int, what: str = "requests finished") -> "Run":
        ended, total = 0, len(workload.arrivals)

        def one_more() -> None:
            nonlocal ended
            ended += 1
            self._bar(what, ended, total)

        self._bar(what, 0, total)
        return self._runner.run(self.endpoint.drive(workload, self._asked.load(self.endpoint, seed), one_more))


@contextmanager
def _driver(asked: BenchOptions) -> "Iterator[tuple[_Driver, About]]":
    from cluster.offline.load.about import about
    from cluster.offline.load.opening import open_endpoint

    assert asked.target is not None
    with asyncio.Runner() as runner, progress_bar() as bar:
        stack = AsyncExitStack()
        endpoint = runner.run(stack.enter_async_context(open_endpoint(asked.target)))
        try:
            say(f"load on {endpoint.description}")
            yield _Driver(runner, endpoint, asked, bar), about([endpoint.description], asked.seeds)
        finally:
            runner.run(stack.aclose())


def load(asked: BenchOptions, goal: Goal | None) -> None:
    """One workload, perhaps at further rates, perhaps with a search for goodput behind it."""
    from cluster.offline.load.searching import GoodputQuery
    from cluster.offline.report.compared import Compared
    from cluster.offline.report.html import More
    from cluster.offline.report.table import probes
    from cluster.offline.scoring.figures import figures

    seed = asked.seeds[0]
    wanted = GoodputQuery(
        asked.source, asked.slo, goal.target if goal else 1.0, asked.seeds, goal.tolerance if goal else 1.0
    )
    first = wanted.at(None, seed, 0)
    if goal is not None:
        _ = wanted.start  # before anything is sent
    with _driver(asked) as (drive, about):
        shown = drive(first, seed)
        sweep = []
        for turn, rate in enumerate(asked.rates, 1):
            sweep.append(figures(drive(wanted.at(rate, seed, turn), seed, f"at {rate:g} requests/s"), asked.slo))
        found = () if goal is None else (_search(wanted, drive, shown),)
    compared = [Compared(shown.system, figures(shown, asked.slo), found, tuple(sweep), shown)]
    more = More(grids=(probes(compared),)) if found else More()
    _finish(asked, about, compared, {"systems": [system_json(each) for each in compared]}, more, asked.source)


def _search(wanted: "GoodputQuery", drive: _Driver, shown: "Run") -> "Goodput":
    from cluster.offline.load.searching import search

    tolerance = f"to within {wanted.tolerance:.0%}"
    say(f"searching goodput, seeds {', '.join(map(str, wanted.seeds))} {tolerance}")
    return search(wanted, drive, shown.gpus, say)


def compare(
    asked: BenchOptions, configurations: Sequence[str], endpoints: "Mapping[str, Target]", runtime: str
) -> None:
    """The same load on several configurations, each started here in turn."""
    from cluster.offline.load.about import about
    from cluster.offline.load.trials import Plan, beside, configuration_of, run_trials
    from cluster.offline.report.compared import Compared
    from cluster.offline.report.table import terminal
    from cluster.offline.report.trials import summary_lines, trial_tables
    from cluster.offline.scoring.figures import figures
    from cluster.offline.scoring.trials import Trials

    made = [beside(each, endpoints[each]) if each in endpoints else configuration_of(each) for each in configurations]
    if len({each.name for each in made}) != len(made):
        raise click.UsageError(f"two of {', '.join(each.name for each in made)} have the same name; rename one")
    plan = Plan(asked.source, asked.rates or (None,), asked.seeds, runtime, asked.access)
    for rate in plan.rates:
        plan.workload(rate, asked.seeds[0])  # before anything is started
    here = about([each.description for each in made], asked.seeds)
    if here.is_busy:
        say(f"load {here.load_before[0]:.1f} on {here.cores} cores: this machine is busy, do not quote these figures")
    runs = len(made) * len(plan.rates) * len(plan.seeds)
    with progress_bar() as bar:
        trials, firsts = _ended(run_trials(made, plan, asked.load, _Bars(bar, runs, asked.out)))
    found = Trials(trials)
    compared = [Compared(name, figures(each, asked.slo), run=each) for name, each in firsts.items()]
    if not asked.as_json:
        for table in trial_tables(found):
            console().print(terminal(table))
        for line in summary_lines(found):
            console().print(line, markup=False)
    document = {"systems": [system_json(each) for each in compared], **_trials_json(found)}
    first = f"Tables of systems and pictures of requests show seed {asked.seeds[0]} at {found.loads[0]} only."
    _finish(asked, here, compared, document, _more(found), asked.source, shown=False, note=first)


def _ended(work: "Coroutine[Any, Any, T]") -> "T":
    """What it gives. Ctrl-C and SIGTERM cancel it, so that what it started is taken down."""
    given: list[T] = []

    async def kept() -> None:
        given.append(await work)

    run(kept())
    return given[0]


class _Bars:
    """On a terminal a bar for all runs and one for each configuration, elsewhere lines for each run.

    Each run's figures are in the folder as soon as it has ended, so that a failure loses no earlier run.
    """

    def __init__(self, bar: "PullProgress", runs: int, out: Path | None) -> None:
        self._file = None if out is None else out / "runs.jsonl"
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text("")
        self._bar = bar
        self._runs = runs
        self._begun = 0
        self._draws = sys.stderr.isatty()

    def starts(self, name: str) -> None:
        if not self._draws:
            say(f"starting {name}")

    def runs(self, name: str, what: str, requests: int) -> "Ended":
        ended = 0

        def one_more() -> None:
            nonlocal ended
            ended += 1
            self._bar(label, ended, requests)

        label = name if self._draws else f"{name}, {what}"
        if self._draws:
            self._bar("runs", self._begun, self._runs)
        self._bar(label, 0, requests)
        self._begun += 1
        return one_more

    def ran(self, trial: "SeedRun") -> None:
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(_run_json(trial)) + "\n")


def _more(found: "Trials") -> "More":
    from cluster.offline.report.html import More, Picture
    from cluster.offline.report.trials import has_verdicts, summary_lines, trial_intervals, trial_tables, verdict_map

    pictures = [Picture("compared", "Means and 95 % confidence intervals.", partial(trial_intervals, found))]
    if has_verdicts(found):
        caption = "Where each wins and loses against the best colocated configuration by that figure."
        pictures.insert(0, Picture("verdicts", caption, partial(verdict_map, found)))
    return More(tuple(summary_lines(found)), tuple(trial_tables(found)), tuple(pictures))


def _trials_json(found: "Trials") -> dict[str, Any]:
    """Every run's figures, and the lines that sum them up."""
    from cluster.offline.report.trials import summary_lines

    return {"runs": [_run_json(each) for each in found.all], "told": list(summary_lines(found))}


def _run_json(trial: "SeedRun") -> dict[str, Any]:
    return {
        "configuration": trial.configuration,
        "is_colocated": trial.is_colocated,
        "load": trial.load,
        "seed": trial.seed,
        "figures": trial.figures.as_json(),
    }


def _finish(
    asked: BenchOptions,
    about: "About",
    compared: "Sequence[Compared]",
    told: dict[str, Any],
    more: "More",
    source: str,
    shown: bool = True,
    note: str = "",
) -> None:
    """Tables or JSON, and the folder. `shown`: whether the systems' own tables are; `note` goes into the page."""
    document = {"about": about.as_json(), **told}
    if asked.as_json:
        print_json(document)
    elif compared and shown:
        print_comparison(compared, as_json=False)
        for reason, count in (each for system in compared for each in system.figures.reasons):
            say(f"{count} requests did not finish: {reason}")
    if asked.out is not None:
        notes = (*about.lines, *filter(None, [note]))
        write_report(compared, asked.out, "Benchmark", source, document=document, notes=notes, more=more)
