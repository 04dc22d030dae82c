"""`diptych simulate`: a workload through the production scheduling code in virtual time, one system or several."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.screen import console, print_json, progress_bar, say

if TYPE_CHECKING:
    from cluster.report.compared import Compared
    from cluster.scoring.goodput import Map
    from cluster.sim.cluster import Surroundings
    from cluster.sim.compare import Case, Question
    from cluster.workload.arrivals import Workload
    from workers.request import SLO

RESULTS = "simulation"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line, checked."""

    cases: "Sequence[Case]"
    workload: "Workload"
    slo: "SLO"
    question: "Question | None"
    seed: int
    trace: bool
    around: "Surroundings | None" = None


@click.command()
@click.option("-f", "--file", "path", type=click.Path(dir_okay=False), help="A cluster YAML: its pools are the system.")
@click.option("--profile", type=click.Path(dir_okay=False, path_type=Path), help="With -f: of `diptych profile`.")
@click.option("--compare", metavar="A,B,...", help="Systems of the field on equal workers; see below.")
@click.option("--model", metavar="NAME", help="With --compare: a model's name, such as llama-2-70b.")
@click.option("--hardware", metavar="GPU", help="With --compare, or for pools that name none: such as h100-80gb.")
@click.option("--workers", type=click.IntRange(1), default=8, show_default=True, help="With --compare: how many.")
@click.option("--tensor", type=click.IntRange(1), default=1, show_default=True, help="GPUs that share a layer.")
@click.option("--pipeline", type=click.IntRange(1), default=1, show_default=True, help="Stages of a worker.")
@click.option("--prefills", type=click.IntRange(1), help="Workers that prefill in systems that split; else balanced.")
@click.option("--network", type=click.Choice(("cross", "node")), default="cross", help="Which link KV takes.")
@click.option("--workload", "source", required=True, metavar="SOURCE", help="A trace file, or such as poisson:rate=4.")
@click.option("--ttft", "ttft_s", type=float, metavar="S", help="Promise: seconds to the first token.")
@click.option("--tpot", "tpot_s", type=float, metavar="S", help="Promise: seconds for each token after it.")
@click.option("--goodput", "wants_goodput", is_flag=True, help="Search the largest rate that keeps both promises.")
@click.option("--target", "targets", type=float, multiple=True, help="Share of requests that must (0.9 and 0.99).")
@click.option(
    "--requests", type=click.IntRange(10), default=300, show_default=True, help="Of a goodput probe, at least."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Of a goodput search.")
@click.option("--processes", type=click.IntRange(1), help="How many to use (all cores).")
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), help="Report, pictures, JSON go here.")
@click.option("--trace", "wants_trace", is_flag=True, help="Keep every step: Gantt pictures and a Perfetto file (-o).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def simulate(
    path: str | None,
    profile: Path | None,
    compare: str | None,
    model: str | None,
    hardware: str | None,
    workers: int,
    tensor: int,
    pipeline: int,
    prefills: int | None,
    network: str,
    source: str,
    ttft_s: float | None,
    tpot_s: float | None,
    wants_goodput: bool,
    targets: tuple[float, ...],
    requests: int,
    seed: int,
    seeds: int,
    processes: int | None,
    out: Path | None,
    wants_trace: bool,
    as_json: bool,
) -> None:
    """Replay a workload through the shipped scheduling code on a virtual clock; no GPU and no model is needed.

    Systems for --compare: static, orca, vllm, sarathi, distserve, splitwise, tetri, mooncake, mooncake-late,
    mooncake-early, mooncake-predictive, ours. Each gets the same workers.

    \b
    Examples:
      diptych simulate -f cluster.yaml --hardware a100-80gb --workload poisson:rate=2,count=300
      diptych simulate --compare sarathi,distserve,ours --model llama-2-70b --hardware h100-80gb --tensor 8 \\
          --workers 8 --workload AzureLLMInferenceTrace_conv.csv.gz:first=2000 --ttft 1 --tpot 0.1 --goodput -o out
    """
    from cluster.workload.load import load_workload

    workload = load_workload(source, seed=seed)
    slo = _slo(ttft_s, tpot_s, wants_goodput)
    if (path is None) == (compare is None):
        raise click.UsageError("give either a cluster YAML (-f) or systems (--compare), one of them")
    around: Surroundings | None = None
    if path is not None:
        case, around = _from_file(path, hardware, network, profile)
        cases = [case]
    elif profile is not None:
        raise click.UsageError("--profile goes with a cluster YAML (-f): systems to compare run on --hardware")
    else:
        if model is None or hardware is None:
            raise click.UsageError("--compare needs --model and --hardware")
        fleet = _Fleet(model, hardware, tensor, pipeline, workers, prefills, network, workload)
        cases = [fleet.case(name.strip()) for name in (compare or "").split(",") if name.strip()]
    question = _question(workload, slo, targets, requests, seed, seeds, around) if wants_goodput else None
    wanted = Wanted(cases, workload, slo, question, seed, wants_trace, around)
    compared = _run(wanted, processes or _cores())
    _tell(compared, as_json)
    if out is not None:
        _write(compared, out, source)


def _slo(ttft_s: float | None, tpot_s: float | None, needed: bool) -> "SLO":
    from workers.request import SLO

    for name, value in (("--ttft", ttft_s), ("--tpot", tpot_s)):
        if value is not None and not 0.0 < value < float("inf"):
            raise click.UsageError(f"{name} is {value}; a promise is above 0 seconds")
    if needed and ttft_s is None and tpot_s is None:
        raise click.UsageError("--goodput needs a promise: --ttft, --tpot, or both")
    return SLO(ttft_s, tpot_s)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_file(
    path: str, hardware: str | None, network: str, profile: Path | None
) -> "tuple[Case, Surroundings | None]":
    from cluster.sim.compare import Case
    from cluster.sim.fleet import models_of
    from cluster.sim.measured import models_of as measured_models
    from cluster.sim.measured import surroundings_of
    from cluster.spec import load_spec
    from workers.profiles.measured import load

    spec = load_spec(path)
    if profile is not None:
        measured = load(profile)
        return Case(spec.name, spec, measured_models(measured, spec)), surroundings_of(measured)
    if hardware is not None:
        pools = tuple(pool if pool.hardware or pool.cost else replace(pool, hardware=hardware) for pool in spec.pools)
        spec = replace(spec, pools=pools)
    return Case(spec.name, spec, models_of(spec, link=network)), None


@dataclass(frozen=True, slots=True)
class _Fleet:
    model: str
    hardware: str
    tensor: int
    pipeline: int
    workers: int
    prefills: int | None
    network: str
    workload: "Workload"

    def case(self, name: str) -> "Case":
        from cluster.sim.compare import Case
        from cluster.sim.fleet import fleet, pool_model
        from cluster.sim.systems import arrange, balanced
        from workers.config import ParallelConfig

        parallel = ParallelConfig(tensor=self.tensor, pipeline=self.pipeline)
        equal = fleet(self.model, self.hardware, parallel, self.workers)
        made = pool_model(self.model, self.hardware, parallel, link=self.network)
        prefills = self.prefills or balanced(self.workers, made.cost, self.workload, equal.engine)
        spec = arrange(name, equal, prefills)
        return Case(name, spec, {pool.name: made for pool in spec.pools})


def _question(
    workload: "Workload",
    slo: "SLO",
    targets: Sequence[float],
    requests: int,
    seed: int,
    seeds: int,
    around: "Surroundings | None",
) -> "Question":
    from cluster.sim.cluster import ALONE
    from cluster.sim.compare import Question

    for target in targets:
        if not 0.0 < target <= 1.0:
            raise click.UsageError(f"--target is {target}; it is a share, above 0 and at most 1")
    wanted = tuple(sorted(set(targets))) or (0.9, 0.99)
    draws = tuple(range(seed, seed + seeds))
    return Question(workload, slo, wanted, draws, requests, around=around or ALONE)


def _run(wanted: Wanted, processes: int) -> "list[Compared]":
    from cluster.sim.compare import processes as opened

    with opened(processes) as each, progress_bar() as tell:
        total = len(wanted.cases) * (2 if wanted.question else 1)
        done = partial(tell, "simulating")
        done(0, total)
        return _compared(wanted, each, lambda count: done(count, total))


def _compared(wanted: Wanted, each: "Map", done: Callable[[int], None]) -> "list[Compared]":
    from cluster.report.compared import Compared
    from cluster.scoring.figures import figures
    from cluster.sim.cluster import ALONE
    from cluster.sim.compare import capacity, goodputs, run_all
    from cluster.sim.run import Options

    options = Options(seed=wanted.seed, slo=wanted.slo, trace=wanted.trace, around=wanted.around or ALONE)
    made: list[Compared] = []
    for case, run in zip(wanted.cases, run_all(wanted.cases, wanted.workload, [options], each), strict=True):
        made.append(Compared(case.name, figures(run, wanted.slo), run=run))
        done(len(made))
    if wanted.question is not None:
        for number, case in enumerate(wanted.cases):
            start = capacity(case, wanted.workload) / 4
            made[number] = replace(made[number], goodputs=goodputs(case, wanted.question, start, each))
            done(len(wanted.cases) + number + 1)
    return made


def _tell(compared: "Sequence[Compared]", as_json: bool) -> None:
    from cluster.report.table import comparison, pools, terminal

    if as_json:
        print_json([_json(each) for each in compared])
        return
    screen = console()
    screen.print(terminal(comparison(compared)))
    screen.print(terminal(pools(compared)))
    for system in compared:
        for found in system.goodputs:
            screen.print(f"{system.name}: {found.told}", markup=False)


def _json(system: "Compared") -> dict[str, Any]:
    return {
        "system": system.name,
        "figures": system.figures.as_json(),
        "goodput": [asdict(found) | {"per_gpu": found.per_gpu, "told": found.told} for found in system.goodputs],
    }


def _write(compared: "Sequence[Compared]", out: Path, source: str) -> None:
    import json

    from cluster.report import perfetto
    from cluster.report.html import page, pictures
    from cluster.report.style import png

    out.mkdir(parents=True, exist_ok=True)
    (out / f"{RESULTS}.json").write_text(json.dumps([_json(each) for each in compared], indent=2) + "\n")
    written = [f"{RESULTS}.json", "report.html"]
    images = {each.name: png(each.draw()) for each in pictures(compared)}
    (out / "report.html").write_text(page("Simulation", compared, subtitle=source, images=images))
    for name, image in images.items():
        (out / f"{name}.png").write_bytes(image)
        written.append(f"{name}.png")
    for system in compared:
        if system.run is not None and system.run.steps:
            perfetto.write(system.run, out / f"{system.name}.trace.json")
            written.append(f"{system.name}.trace.json (open it in ui.perfetto.dev)")
    say(f"written to {out}: {', '.join(written)}")
