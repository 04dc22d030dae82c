"""`diptych simulate`: a workload through the production scheduling code in virtual time, one system or several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.comparison import positive_slo, tell, write
from cluster.cli.groups import GroupedCommand
from cluster.cli.screen import progress_bar

if TYPE_CHECKING:
    from cluster.offline.report.compared import Compared
    from cluster.offline.scoring.goodput import Map
    from cluster.offline.sim.cluster import Surroundings
    from cluster.offline.sim.compare import Case, Question
    from cluster.offline.workload.arrivals import Workload
    from workers.request import SLO


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line, checked."""

    cases: "Sequence[Case]"
    workload: "Workload"
    slo: "SLO"
    question: "Question | None"
    rates: tuple[float, ...]
    requests: int
    seed: int
    trace: bool
    around: "Surroundings | None" = None


@click.command(cls=GroupedCommand)
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
@click.option("--rates", metavar="R,R,...", help="Also run at these rates, for curves of latency over rate.")
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
    rates: str | None,
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
    from cluster.offline.workload.load import load_workload

    workload = load_workload(source, seed=seed)
    slo = positive_slo(ttft_s, tpot_s)
    if wants_goodput and slo.ttft_s is None and slo.tpot_s is None:
        raise click.UsageError("--goodput needs a promise: --ttft, --tpot, or both")
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
    wanted = Wanted(cases, workload, slo, question, rates_of(rates), requests, seed, wants_trace, around)
    compared = _run(wanted, processes or _cores())
    tell(compared, as_json)
    if out is not None:
        write(compared, out, "Simulation", source)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_file(
    path: str, hardware: str | None, network: str, profile: Path | None
) -> "tuple[Case, Surroundings | None]":
    from cluster.offline.sim.compare import Case
    from cluster.offline.sim.fleet import models_of
    from cluster.offline.sim.measured import models_of as measured_models
    from cluster.offline.sim.measured import surroundings_of
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
        from cluster.offline.sim.compare import Case
        from cluster.offline.sim.fleet import fleet, pool_model
        from cluster.offline.sim.systems import arrange, balanced
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
    from cluster.offline.sim.cluster import ALONE
    from cluster.offline.sim.compare import Question

    for target in targets:
        if not 0.0 < target <= 1.0:
            raise click.UsageError(f"--target is {target}; it is a share, above 0 and at most 1")
    wanted = tuple(sorted(set(targets))) or (0.9, 0.99)
    draws = tuple(range(seed, seed + seeds))
    return Question(workload, slo, wanted, draws, requests, around=around or ALONE)


def rates_of(text: str | None) -> tuple[float, ...]:
    """`1,2,4` as rising rates; None: none."""
    try:
        rates = tuple(sorted({float(each) for each in (text or "").split(",") if each.strip()}))
    except ValueError:
        raise click.UsageError(f"--rates is {text!r}; it is numbers with commas, such as 1,2,4") from None
    if any(not 0.0 < rate < float("inf") for rate in rates):
        raise click.UsageError(f"--rates is {text!r}; every rate is above 0 requests a second")
    return rates


def _run(wanted: Wanted, processes: int) -> "list[Compared]":
    from cluster.offline.sim.compare import processes as opened

    with opened(processes) as each, progress_bar() as tell:
        total = len(wanted.cases) * (1 + bool(wanted.rates) + bool(wanted.question))
        done = partial(tell, "simulating")
        done(0, total)
        return _compared(wanted, each, lambda count: done(count, total))


def _compared(wanted: Wanted, each: "Map", done: Callable[[int], None]) -> "list[Compared]":
    from cluster.offline.report.compared import Compared
    from cluster.offline.scoring.figures import figures
    from cluster.offline.sim.cluster import ALONE
    from cluster.offline.sim.compare import capacity, goodputs, run_all, run_at
    from cluster.offline.sim.run import Options

    options = Options(seed=wanted.seed, slo=wanted.slo, trace=wanted.trace, around=wanted.around or ALONE)
    made: list[Compared] = []
    for case, run in zip(wanted.cases, run_all(wanted.cases, wanted.workload, [options], each), strict=True):
        made.append(Compared(case.name, figures(run, wanted.slo), run=run))
        done(len(made))
    count = len(made)
    for number, case in enumerate(wanted.cases):
        if wanted.rates:
            runs = run_at(case, wanted.workload, wanted.rates, wanted.requests, options, each)
            made[number] = replace(made[number], sweep=tuple(figures(run, wanted.slo) for run in runs))
            done(count := count + 1)
        if wanted.question is not None:
            start = capacity(case, wanted.workload) / 4
            made[number] = replace(made[number], goodputs=goodputs(case, wanted.question, start, each))
            done(count := count + 1)
    return made
