"""`diptych plan`: the best cluster for a load, or what one instance of a model delivers."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.comparison import positive_slo
from cluster.cli.options import FILE, JSON, KV_LINK, OUTPUT_FILE, SHARE, GroupedCommand, access_options, grouped
from cluster.cli.screen import print_json, print_lines, say
from cluster.cli.search import INTERRUPTED, SearchProgress, cut_short, search
from cluster.cli.trace import duration
from diptych.access import Access
from workers.config import QUANTIZED

if TYPE_CHECKING:
    from cluster.offline.plan.budget import Budget
    from cluster.offline.plan.load import PlanLoad
    from cluster.offline.plan.request import PlanRequest
    from cluster.offline.plan.running import RatedArrangement
    from workers.request import SLO

INSTANCE_S, PLACEMENT_S = 120.0, 600.0  # default time limits
FIRST_S = 50.0  # the first verdict is what is known by then, if it is not certain earlier
TTFT_S, TPOT_S = 1.0, 0.05  # default SLOs with --prompt
USERS = "1,8,64"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of the command line, before any check."""

    model: str | None
    hardware: str | None
    gpus: int | None
    nodes: int | None
    workload: str | None
    own_times: bool
    rate: float | None
    ttft: float | None
    tpot: float | None
    target: float
    objective: str | None
    kv_link: str
    price: tuple[str, ...]
    costs: str
    kv_dtype: str | None
    prompt: str | None
    output: str | None
    users: str
    from_cluster: str | None
    profile: Path | None
    last_s: float
    requests: int
    seeds: int
    processes: int | None
    limit: float | None
    out: Path | None
    as_json: bool


machines = grouped("Cluster")
load = grouped("Load")
slos = grouped("SLO")
instance = grouped("One instance")
running = grouped("A running cluster")
effort = grouped("Simulation")


@click.command(cls=GroupedCommand)
@machines("--model", metavar="NAME", help="Model, such as llama-3-8b, or a folder with its config.json.")
@machines(
    "--hardware",
    metavar="H[,H2]",
    help="GPU types, such as a100-80gb,h100-80gb; with --from-cluster: its ranks', for prices.",
)
@machines("--gpus", type=click.IntRange(1, 4096), help="Maximum number of GPUs.")
@machines("--nodes", type=click.IntRange(1), help="Number of equal nodes. [default: by the GPU's data sheet]")
@machines(
    "--objective",
    type=click.Choice(("gpus", "cost", "power", "throughput")),
    help="Goodput per GPU, dollar or watt, or goodput alone; with --rate the least GPUs, dollars or watts. "
    "[default: gpus; cost with several GPU types]",
)
@machines("--kv-link", type=KV_LINK, default="inter-node", help="Split across nodes, or pairs inside nodes.")
@machines(
    "--price",
    multiple=True,
    metavar="NAME=DOLLARS",
    help="Dollars an hour of one GPU, or a JSON file of {name: dollars}; repeatable; with --from-cluster of a pool. "
    "[default: dated list prices]",
)
@machines("--source", "costs", default="best", help="Source of step times: best, roofline, vidur, ...")
@machines("--kv-dtype", type=click.Choice(QUANTIZED), help="KV dtype. [default: of the weights]")
@load("--workload", metavar="SOURCE", help="Trace file, or a generator: poisson:rate=4,lengths=mixed.")
@load("--own-times", is_flag=True, help="Keep the workload's own arrival times and prefixes. [default: Poisson]")
@load("--rate", type=float, help="Requests/s to serve. [default: maximize goodput]")
@slos("--ttft", type=float, metavar="SECONDS", help="SLO: time to first token.")
@slos("--tpot", type=float, metavar="SECONDS", help="SLO: time per output token after the first.")
@slos("--attainment", "target", type=SHARE, default=0.9, help="Share of requests that must meet it.")
@instance("--prompt", metavar="N[-M]", help="Prompt tokens: ask what one instance delivers.")
@instance("--output", metavar="N[-M]", help="Output tokens: ask what one instance delivers.")
@instance("--users", default=USERS, help="With --prompt: numbers of concurrent users.")
@running("--from-cluster", metavar="ADDRESS", help="Gateway of a running cluster: ask what it should change.")
@running("--profile", type=FILE, help="With --from-cluster: its costs, the output of `diptych profile`.")
@running(
    "--last", "last_s", default="1h", metavar="TIME", callback=duration,
    help="With --from-cluster: its load of this time, as far as the gateway remembers.",
)  # fmt: skip
@effort("--requests", type=click.IntRange(10, 100_000), default=300, help="Requests of one run.")
@effort("--seeds", type=click.IntRange(1, 100), default=3, help="Seeds of each run.")
@effort("--processes", type=click.IntRange(1), help="Processes to use. [default: one per core]")
@effort(
    "--limit",
    type=click.FloatRange(min=1.0, max=86_400.0),
    metavar="SECONDS",
    help=f"Time limit of the simulation; the best answer by then is printed. [default: {INSTANCE_S:g} with --prompt or "
    f"--from-cluster, else {PLACEMENT_S:g}]",
)
@click.option("-o", "--out", type=OUTPUT_FILE, help="Write the plan as a cluster YAML.")
@JSON
@access_options
def plan(access: Access, **options: Any) -> None:
    """Find the best cluster for a load: whether to disaggregate, pools, parallelism, replicas, chunk sizes.

    An estimate from closed forms comes at once, for each kind of GPU. A first verdict comes within a minute: what the
    estimate favors, simulated with the shipped scheduling code. Then more is simulated until --limit. Nothing needs a
    GPU. --prompt and --output ask what one instance delivers: TTFT, TPOT and throughput. --from-cluster takes a running
    cluster's load and says whether roles, replicas or parallel settings should change.

    At --limit, or on Ctrl-C (exit status 130), the best answer so far is printed and marked as incomplete.

    \b
    Examples:
      diptych plan --model opt-13b --hardware a100-80gb --gpus 4 --nodes 1 --ttft 0.2 --tpot 0.1 \\
          --workload poisson:rate=4,lengths=100-1500/10-400,count=2000 -o plan.yaml
      diptych plan --model llama-2-70b --hardware a100-80gb,h100-80gb --gpus 64 --rate 12 --objective cost \\
          --workload AzureLLMInferenceTrace_conv.csv.gz --ttft 1 --tpot 0.1
      diptych plan --model llama-3-8b --hardware h100-80gb,l4 --prompt 1500-2000 --output 500
      diptych plan --from-cluster 127.0.0.1:50051 --profile profile.json --ttft 1 --tpot 0.1 --last 1h
    """
    from cluster.offline.plan.request import PlanError

    chosen = PlanOptions(**options)
    known: dict[str, Any] = {"complete": False}  # before the simulation, for --json
    try:
        if chosen.from_cluster is not None:
            _advise(chosen, access)
        elif chosen.prompt or chosen.output:
            _measure_instances(chosen, known)
        else:
            _place(chosen, known)
    except PlanError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        _print_answer(chosen, ["Nothing was simulated."], known, "Ctrl-C", 0.0)


def _need(options: PlanOptions, *names: str) -> None:
    missing = [f"--{name}" for name in names if getattr(options, name) is None]
    if missing:
        raise click.UsageError(f"this question needs {', '.join(missing)} as well")


def _kinds(options: PlanOptions) -> list[str]:
    from cluster.offline.plan.request import PlanError

    kinds = [name.strip() for name in (options.hardware or "").split(",") if name.strip()]
    if not kinds or len(set(kinds)) != len(kinds):
        raise PlanError(f"--hardware is {options.hardware!r}; it must name one or more different kinds of GPU")
    return kinds


def _request(options: PlanOptions, hardware: Sequence[str], gpus: int, load: "PlanLoad", slo: "SLO") -> "PlanRequest":
    from cluster.offline.plan.dollars import parse_prices
    from cluster.offline.plan.request import PlanRequest

    return PlanRequest(
        model=options.model or "",
        hardware=tuple(hardware),
        gpus=gpus,
        load=load,
        slo=slo,
        nodes=options.nodes,
        rate=options.rate,
        target=options.target,
        objective=options.objective or ("gpus" if len(hardware) == 1 else "cost"),
        kv_link=options.kv_link,
        requests=options.requests,
        seeds=tuple(range(options.seeds)),
        source=options.costs,
        kv_dtype=options.kv_dtype or "",
        prices=parse_prices(options.price, _kinds(options)),
    )


def _print_estimate(options: PlanOptions, lines: list[str]) -> None:
    """Print the estimate before the simulation, unless the output is JSON, which has both in one object."""
    if not options.as_json:
        print_lines([*lines, ""])


def _print_answer(
    options: PlanOptions, lines: list[str], value: dict[str, Any], ended_by: str, limit_s: float, written: str = ""
) -> None:
    """Print the simulated answer, and on stderr what was written. If Ctrl-C cut it short, exit like an interrupted
    program."""
    if options.as_json:
        print_json({**value, "ended_by": ended_by})
    else:
        print_lines([*lines, *cut_short(ended_by, limit_s)])
    if written:
        say(written)
    if ended_by == "Ctrl-C":
        sys.exit(INTERRUPTED)


def _place(options: PlanOptions, known: dict[str, Any]) -> None:
    from cluster.offline.plan.estimate import outline
    from cluster.offline.plan.load import PlanLoad, too_long
    from cluster.offline.plan.placement import PlacementResult, PlacementSearch
    from cluster.offline.plan.report import (
        changes_json,
        estimate_json,
        estimate_lines,
        first_json,
        first_lines,
        plan_json,
        plan_lines,
        write_plan,
    )
    from cluster.offline.plan.verdict import FirstVerdict, first_verdict, judge
    from cluster.offline.workload.load import load_workload

    _need(options, "model", "hardware", "gpus", "workload", "ttft", "tpot")
    load = PlanLoad.of(load_workload(options.workload or ""), options.own_times)
    request = _request(options, _kinds(options), options.gpus or 0, load, positive_slo(options.ttft, options.tpot))
    estimates = outline(request)
    known |= {
        "warnings": too_long(request.model, load),
        "estimates": [estimate_json(request, each) for each in estimates.estimates],
        "does_not_fit": estimates.refused,
        "what_if": changes_json(request, estimates.best(request)),
    }
    _print_estimate(options, [*estimate_lines(request, estimates), *known["warnings"]])
    estimates.check_any_meets(request)
    limit_s = options.limit or PLACEMENT_S
    verdicts: list[FirstVerdict] = []

    def work(budget: "Budget", progress: SearchProgress) -> PlacementResult:
        first = estimates.contenders(request)
        placement = PlacementSearch(request, budget.each, progress.update, budget.past, first, budget.processes)

        def interim(seconds: float) -> list[str]:
            """At `FIRST_S`, and when it is decided."""
            if not placement.race.decided and (verdicts or seconds < FIRST_S):
                return []
            if verdicts and verdicts[-1].decided:
                return []
            verdicts.append(first_verdict(request, placement.race, seconds))
            return [] if options.as_json else first_lines(request, verdicts[-1])

        progress.interim = interim
        found = placement.search()
        if not verdicts:
            verdicts.append(first_verdict(request, placement.race, budget.limit_s - budget.left_s))
        return found

    found, ended_by = search(limit_s, options.processes, work)
    verdict = judge(request, found.options, found.complete) if found.options else None
    written = ""
    if verdict is not None and options.out is not None:
        written = f"written to {options.out}. {write_plan(options.out, request, found, verdict)}"
    value = known | {"first": first_json(request, verdicts[-1])} | plan_json(request, found, verdict)
    _print_answer(options, plan_lines(request, found, verdict), value, ended_by, limit_s, written)
    if verdict is None and options.out is not None:
        raise click.ClickException(f"{options.out} was not written: nothing was decided in time; give a longer --limit")


def _measure_instances(options: PlanOptions, known: dict[str, Any]) -> None:
    from cluster.offline.plan.instance import Instance, LengthRanges, answers, instances_of, parse_range
    from cluster.offline.plan.instance_report import (
        instance_estimate_lines,
        instance_estimates_json,
        instance_json,
        instance_lines,
    )
    from cluster.offline.plan.load import PlanLoad, too_long
    from cluster.offline.plan.request import PlanError
    from workers.profiles.capacity import min_gpus

    _need(options, "model", "hardware", "prompt", "output")
    lengths = LengthRanges(parse_range(options.prompt or "", "--prompt"), parse_range(options.output or "", "--output"))
    users = _users(options.users)
    load = PlanLoad.of(lengths.workload())
    slo = positive_slo(
        TTFT_S if options.ttft is None else options.ttft, TPOT_S if options.tpot is None else options.tpot
    )
    requests = [
        _request(options, [name], options.gpus or min_gpus(options.model or "", name)[0], load, slo)
        for name in _kinds(options)
    ]
    instances: list[Instance] = []
    refused = []
    for request in requests:
        try:
            instances += instances_of(request, lengths)
        except PlanError as error:
            refused.append(f"{', '.join(request.hardware)}: {error}")
    if not instances:
        raise PlanError("; ".join(refused))
    known |= instance_estimates_json(instances) | {"does_not_fit": refused}
    known["warnings"] = too_long(requests[0].model, load)
    _print_estimate(options, [*instance_estimate_lines(instances), *refused, *known["warnings"]])
    limit_s = options.limit or INSTANCE_S
    found, ended_by = search(
        limit_s,
        options.processes,
        lambda budget, progress: answers(instances, users, budget.each, progress.update),
    )
    value = known | instance_json(requests[0], lengths, found)
    _print_answer(options, instance_lines(requests[0], lengths, found), value, ended_by, limit_s)


def _advise(options: PlanOptions, access: Access) -> None:
    """What the running cluster should change."""
    from cluster.offline.plan.dollars import parse_prices
    from cluster.offline.plan.running import advice_json, advice_lines, observed, try_all
    from diptych.client import Client
    from workers.profiles.hardware import hardware_of
    from workers.profiles.measured import load

    _need(options, "profile", "ttft", "tpot")
    profile = load(options.profile or Path())
    slo = positive_slo(options.ttft, options.tpot)
    with Client(options.from_cluster or "", access=access) as client:
        _, window = client.trace(last_s=options.last_s)
        view = client.status().view
    pools = [pool.pool for pool in profile.pools]
    prices = parse_prices(options.price, pools)
    if options.hardware and (listed := hardware_of(options.hardware).price_per_hour) is not None:
        prices = dict.fromkeys(pools, listed) | prices
    running = observed(view, window, profile, slo, options.target, prices)
    tried: list[RatedArrangement] = []

    def work(budget: "Budget", progress: SearchProgress) -> None:
        for each in try_all(running, budget.each):
            tried.append(each)
            met = f"{each.attained.both:.1%} of requests meet the SLO"
            progress.update(each.arrangement.description(profile), met)

    limit_s = options.limit or INSTANCE_S
    _, ended_by = search(limit_s, options.processes, work)
    value = {"complete": not ended_by, **advice_json(running, tried)}
    _print_answer(options, advice_lines(running, tried), value, ended_by, limit_s)


def _users(text: str) -> list[int]:
    try:
        users = [int(each) for each in text.split(",")]
    except ValueError:
        users = [0]
    if not users or min(users) < 1 or max(users) > 10_000:
        raise click.UsageError(f"--users is {text!r}; it must be numbers from 1 to 10000, such as {USERS}")
    return users
