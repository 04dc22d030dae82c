"""`diptych simulate`: a workload on one or several systems, in virtual time, with the production scheduling code."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.comparison import positive_slo, print_comparison, write_report
from cluster.cli.options import FILE, KV_LINK, OUTPUT_FOLDER, SHARE, GroupedCommand, grouped
from cluster.cli.screen import progress_bar
from cluster.cli.search import cores

if TYPE_CHECKING:
    from cluster.offline.report.table import SystemResult
    from cluster.offline.sim.cluster import Environment
    from cluster.offline.sim.compare import Case, GoodputOptions
    from cluster.offline.sim.run import RunOptions
    from cluster.offline.workload.arrivals import Workload
    from cluster.spec import ClusterSpec
    from workers.config import ParallelConfig
    from workers.request import SLO

system = grouped("System")
load = grouped("Load")
goodput = grouped("SLO and goodput")
output = grouped("Output")


@click.command(cls=GroupedCommand)
@system("-f", "--file", "path", type=click.Path(dir_okay=False), help="Cluster YAML to simulate.")
@system("--profile", type=FILE, help="With -f: output of `diptych profile`.")
@system("--compare", metavar="A,B,...", help="Systems to compare on equal workers; see above.")
@system("--model", metavar="NAME", help="With --compare: model, such as llama-2-70b.")
@system("--hardware", metavar="GPU", help="GPU, such as h100-80gb: with --compare, or for pools that name none.")
@system("--workers", type=click.IntRange(1), default=8, help="With --compare: number of workers.")
@system("--tensor", type=click.IntRange(1), default=1, help="Tensor parallel size of a worker.")
@system("--pipeline", type=click.IntRange(1), default=1, help="Pipeline parallel size of a worker.")
@system("--prefills", type=click.IntRange(1), help="Prefill workers of disaggregated systems. [default: balanced]")
@system("--kv-link", type=KV_LINK, default="inter-node", help="Link that KV handoffs take.")
@load("--workload", "source", required=True, metavar="SOURCE", help="Trace file, or a generator: poisson:rate=4.")
@goodput("--ttft", "ttft_s", type=float, metavar="SECONDS", help="SLO: time to first token.")
@goodput("--tpot", "tpot_s", type=float, metavar="SECONDS", help="SLO: time per output token after the first.")
@goodput("--goodput", "wants_goodput", is_flag=True, help="Search the highest rate that meets the SLO.")
@goodput(
    "--attainment",
    "targets",
    type=SHARE,
    multiple=True,
    help="Share of requests that must meet it; repeatable. [default: 0.9, 0.99]",
)
@goodput("--requests", type=click.IntRange(10), default=300, help="Minimum requests of a goodput probe.")
@load("--seed", type=int, default=0, help="Seed of everything generated.")
@goodput("--seeds", type=click.IntRange(1), default=3, help="Seeds of a goodput search.")
@click.option("--processes", type=click.IntRange(1), help="Processes to use. [default: one per core]")
@output("-o", "--out", type=OUTPUT_FOLDER, help="Output folder: report, pictures, JSON.")
@output("--trace", "wants_trace", is_flag=True, help="With -o: also a Perfetto file of every step.")
@output("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
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
    kv_link: str,
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
    """Replay a workload through the shipped scheduling code in virtual time.

    Needs no GPU and no model.

    Systems for --compare: static, orca, vllm, sarathi, distserve, splitwise, mooncake, mooncake-predictive,
    ours. All get the same workers.

    \b
    Examples:
      diptych simulate -f cluster.yaml --hardware a100-80gb --workload poisson:rate=2,count=300
      diptych simulate --compare sarathi,distserve,ours --model llama-2-70b --hardware h100-80gb --tensor 8 \\
          --workers 8 --workload AzureLLMInferenceTrace_conv.csv.gz:first=2000 --ttft 1 --tpot 0.1 --goodput -o out
    """
    from cluster.offline.sim.cluster import DEFAULT_ENVIRONMENT
    from cluster.offline.sim.compare import GoodputOptions
    from cluster.offline.sim.run import RunOptions
    from cluster.offline.workload.load import load_workload
    from workers.config import ParallelConfig

    workload = load_workload(source, seed=seed)
    slo = positive_slo(ttft_s, tpot_s)
    if wants_goodput and slo.ttft_s is None and slo.tpot_s is None:
        raise click.UsageError("--goodput needs an SLO: --ttft, --tpot, or both")
    if (path is None) == (compare is None):
        raise click.UsageError("give either a cluster YAML (-f) or systems (--compare), one of them")
    environment = DEFAULT_ENVIRONMENT
    if path is not None and profile is not None:
        cases, environment = _from_profile(path, profile)
    elif path is not None:
        cases = _from_file(path, hardware, kv_link)
    elif profile is not None:
        raise click.UsageError("--profile goes with a cluster YAML (-f): systems to compare run on --hardware")
    elif model is None or hardware is None:
        raise click.UsageError("--compare needs --model and --hardware")
    else:
        names = [name.strip() for name in (compare or "").split(",") if name.strip()]
        parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
        cases = _systems(names, model, hardware, parallel, workers, prefills, kv_link, workload, slo)
    options = RunOptions(seed=seed, slo=slo, trace=wants_trace, environment=environment)
    search = None
    if wants_goodput:
        shares = tuple(sorted(set(targets))) or (0.9, 0.99)
        of_seeds = tuple(range(seed, seed + seeds))
        search = GoodputOptions(workload, slo, shares, of_seeds, requests, environment=environment)
    compared = _run(cases, workload, options, search, processes or cores())
    print_comparison(compared, as_json)
    if out is not None:
        write_report(compared, out, "Simulation", source)


def _one_model(path: str) -> "ClusterSpec":
    from cluster.spec import SpecError
    from cluster.spec_file import load_spec

    spec = load_spec(path)
    spec.check_one_model("a simulation")
    if spec.adapters:
        raise SpecError(
            "adapters: a simulation knows none; leave them out, and their requests count as the model's own"
        )
    return spec


def _from_profile(path: str, profile: Path) -> "tuple[list[Case], Environment]":
    from cluster.offline.sim.compare import Case
    from cluster.offline.sim.fleet import environment_of, measured_models, with_kv_blocks
    from workers.profiles.measured import load

    spec, measured = with_kv_blocks(_one_model(path)), load(profile)
    return [Case(spec.name, spec, measured_models(measured, spec))], environment_of(measured)


def _from_file(path: str, hardware: str | None, kv_link: str) -> "list[Case]":
    """`hardware`: of pools that name none."""
    from cluster.offline.sim.compare import Case
    from cluster.offline.sim.fleet import models_of, with_kv_blocks

    spec = _one_model(path)
    if hardware is not None:
        pools = tuple(pool if pool.hardware or pool.cost else replace(pool, hardware=hardware) for pool in spec.pools)
        spec = replace(spec, pools=pools)
    spec = with_kv_blocks(spec)
    return [Case(spec.name, spec, models_of(spec, link=kv_link))]


def _systems(
    names: Sequence[str],
    model: str,
    hardware: str,
    parallel: "ParallelConfig",
    workers: int,
    prefills: int | None,
    kv_link: str,
    workload: "Workload",
    slo: "SLO",
) -> "list[Case]":
    from cluster.offline.sim.compare import Case
    from cluster.offline.sim.fleet import fleet, pool_model
    from cluster.offline.sim.systems import arrange, prefills_of

    equal = fleet(model, hardware, parallel, workers)
    of_pool = pool_model(model, hardware, parallel, link=kv_link)
    specs = [
        (name, arrange(name, equal, prefills or prefills_of(name, of_pool.cost, equal, workload, slo)))
        for name in names
    ]
    return [Case(name, spec, {pool.name: of_pool for pool in spec.pools}) for name, spec in specs]


def _run(
    cases: "Sequence[Case]",
    workload: "Workload",
    options: "RunOptions",
    search: "GoodputOptions | None",
    num_processes: int,
) -> "list[SystemResult]":
    """Run all systems at the workload's rate, then search their goodputs."""
    from cluster.offline.report.table import SystemResult
    from cluster.offline.scoring.figures import figures
    from cluster.offline.sim.compare import goodputs, processes, run_case

    made: list[SystemResult] = []
    total = len(cases) * (1 + (search is not None))
    threads = ThreadPoolExecutor(len(cases))  # each hands one system's runs to the processes
    with threads, processes(num_processes) as each, progress_bar() as progress:
        done = 0
        progress("simulating", done, total)
        for case, run in zip(cases, each(partial(run_case, workload=workload, options=options), cases), strict=True):
            made.append(SystemResult(case.name, figures(run, options.slo), run=run))
            progress("simulating", done := done + 1, total)
        if search is not None:
            systems = map if num_processes == 1 else threads.map
            for number, found in enumerate(systems(partial(goodputs, options=search, each=each), cases)):
                made[number] = replace(made[number], goodputs=found)
                progress("simulating", done := done + 1, total)
    return made
