"""`diptych plan`: which cluster for which load; two clusters compared; and the buyer's question."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cluster.cli.comparison import positive_slo
from cluster.cli.groups import GroupedCommand
from cluster.cli.screen import print_json, say
from cluster.cli.searching import INTERRUPTED, cut_short, search

if TYPE_CHECKING:
    from cluster.cli.searching import SearchProgress
    from cluster.offline.plan.asked import PlanRequest
    from cluster.offline.plan.budget import Budget
    from cluster.offline.plan.load import PlanLoad

T = TypeVar("T")

BUYING_S, PLACING_S = 120.0, 600.0  # usual time limits: of the buyer's question, and of the others
TTFT_S, TPOT_S = 1.0, 0.05  # the SLO of --prompt by default
USERS = "1,8,64"


@click.command(cls=GroupedCommand)
@click.option("--model", metavar="NAME", help="Model, such as llama-3-8b, or a folder with its config.json.")
@click.option("--hardware", metavar="H[,H2]", help="GPU types, such as a100-80gb,h100-80gb.")
@click.option("--gpus", type=click.IntRange(1, 4096), help="Maximum number of GPUs.")
@click.option("--nodes", type=click.IntRange(1), help="Number of equal nodes. [default: by the GPU's data sheet]")
@click.option("--workload", "source", metavar="SPEC", help="Trace file, or a generator: poisson:rate=4,lengths=mixed.")
@click.option(
    "--own-times", is_flag=True, help="Keep the workload's own arrival times and prefixes. [default: Poisson]"
)
@click.option("--rate", type=float, help="Requests/s to serve. [default: maximize goodput]")
@click.option("--ttft", "ttft_s", type=float, metavar="SECONDS", help="SLO: time to first token.")
@click.option("--tpot", "tpot_s", type=float, metavar="SECONDS", help="SLO: time per output token after the first.")
@click.option("--target", type=float, default=0.9, show_default=True, help="Share of requests that must meet the SLO.")
@click.option(
    "--objective", type=click.Choice(("gpus", "cost", "power", "throughput")), default="gpus", show_default=True
)
@click.option(
    "--network", type=click.Choice(("fast", "slow")), default="fast", show_default=True, help="Network between nodes."
)
@click.option(
    "--source", "costs", default="best", show_default=True, help="Source of step times: best, roofline, vidur, ..."
)
@click.option("--what-if", "pair", nargs=2, type=click.Path(dir_okay=False), help="Compare two cluster files.")
@click.option("--prompt", metavar="N[-M]", help="Prompt tokens, to ask what one instance gives.")
@click.option("--output", metavar="N[-M]", help="Output tokens, to ask what one instance gives.")
@click.option("--users", default=USERS, show_default=True, help="With --prompt: numbers of concurrent users.")
@click.option(
    "--requests", type=click.IntRange(10, 100_000), default=300, show_default=True, help="Requests of one run."
)
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Seeds of each run.")
@click.option("--processes", type=click.IntRange(1), help="Processes to use. [default: one per core]")
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=1.0, max=86_400.0),
    metavar="SECONDS",
    help=f"Time limit of the simulation; the best answer by then is printed. [default: {BUYING_S:g} with --prompt, "
    f"else {PLACING_S:g}]",
)
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan as a cluster YAML.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def plan(**said: Any) -> None:
    """Find the best cluster for a load: whether to disaggregate, pools, parallelism, replicas, chunk sizes.

    An estimate from closed forms comes at once; then everything is simulated with the shipped scheduling code. Nothing
    needs a GPU. --what-if compares two cluster files. --prompt and --output ask what one instance gives: TTFT, TPOT and
    throughput.

    At --limit, or on Ctrl-C (exit status 130), the best answer so far is printed and marked as incomplete.

    \b
    Examples:
      diptych plan --model opt-13b --hardware a100-80gb --gpus 4 --nodes 1 --ttft 0.2 --tpot 0.1 \\
          --workload poisson:rate=4,lengths=100-1500/10-400,count=2000 -o plan.yaml
      diptych plan --model llama-2-70b --hardware a100-80gb,h100-80gb --gpus 64 --rate 12 --objective cost \\
          --workload AzureLLMInferenceTrace_conv.csv.gz --ttft 1 --tpot 0.1
      diptych plan --what-if a.yaml b.yaml --workload poisson:rate=4,lengths=mixed,count=500 --ttft 1 --tpot 0.1
      diptych plan --model llama-3-8b --hardware h100-80gb,l4 --prompt 1500-2000 --output 500
    """
    from cluster.offline.plan.asked import PlanError

    modes = {
        "--what-if": bool(said["pair"]),
        "--prompt and --output": bool(said["prompt"] or said["output"]),
    }
    if sum(modes.values()) > 1:
        raise click.UsageError(f"{' and '.join(name for name, on in modes.items() if on)}: ask one thing at a time")
    answer: Callable[..., None] = _place
    if said["pair"]:
        answer = _compare
    elif said["prompt"] or said["output"]:
        answer = _buy
    try:
        answer(said)
    except PlanError as error:
        raise click.ClickException(str(error)) from None


def _need(said: dict[str, Any], *names: str) -> None:
    missing = [f"--{name.removesuffix('_s')}" for name in names if said[name] is None]
    if missing:
        wanted = ["--workload" if name == "--source" else name for name in missing]
        raise click.UsageError(f"this question needs {', '.join(wanted)} as well")


def _load(said: dict[str, Any]) -> "PlanLoad":
    from cluster.offline.plan.load import PlanLoad
    from cluster.offline.workload.load import load_workload

    return PlanLoad.of(load_workload(said["source"]), said["own_times"])


def _asked(said: dict[str, Any], load: "PlanLoad", gpus: int) -> "PlanRequest":
    from cluster.offline.plan.asked import PlanRequest

    return PlanRequest(
        model=said["model"],
        hardware=tuple(name.strip() for name in said["hardware"].split(",") if name.strip()),
        gpus=gpus,
        load=load,
        slo=positive_slo(said["ttft_s"], said["tpot_s"]),
        nodes=said["nodes"],
        rate=said["rate"],
        target=said["target"],
        objective=said["objective"],
        network=said["network"],
        requests=said["requests"],
        seeds=tuple(range(said["seeds"])),
        source=said["costs"],
    )


def _first(lines: list[str], as_json: bool) -> None:
    """The closed-form answer, at once: text has it above the simulated one, JSON inside of the one object."""
    if not as_json:
        click.echo("\n".join([*lines, ""]))
        sys.stdout.flush()


def _tell(said: dict[str, Any], lines: list[str], value: dict[str, Any], ended_by: str) -> None:
    """The simulated answer. Exits with the status of an interrupted program when Ctrl-C cut it short."""
    if said["as_json"]:
        print_json({**value, "ended_by": ended_by})
    else:
        click.echo("\n".join([*lines, *cut_short(ended_by, said["limit_s"])]))
    if ended_by == "Ctrl-C":
        sys.exit(INTERRUPTED)


def _search(said: dict[str, Any], usual_s: float, work: "Callable[[Budget, SearchProgress], T]") -> tuple[T, str]:
    said["limit_s"] = said["limit_s"] or usual_s
    return search(said["limit_s"], said["processes"], work)


def _place(said: dict[str, Any]) -> None:
    from cluster.offline.plan.estimate import outline
    from cluster.offline.plan.placement import PlacementSearch
    from cluster.offline.plan.verdict import judged
    from cluster.offline.plan.written import as_json, described, outlined, plain, undecided, write_plan

    _need(said, "model", "hardware", "gpus", "source", "ttft_s", "tpot_s")
    asked = _asked(said, _load(said), said["gpus"])
    first = outline(asked)
    _first(outlined(asked, first), said["as_json"])
    searched, ended_by = _search(
        said, PLACING_S, lambda budget, show: PlacementSearch(asked, budget.each, show.update, budget.past).search()
    )
    verdict = judged(asked, searched.options, searched.complete) if searched.options else None
    if verdict is not None and said["out"] is not None:
        say(f"written to {said['out']}. {write_plan(said['out'], asked, searched, verdict)}")
    lines = described(asked, searched, verdict) if verdict else undecided(asked, searched)
    _tell(said, lines, {**as_json(asked, searched, verdict), "estimates": plain(first)}, ended_by)
    if verdict is None and said["out"] is not None:
        raise click.ClickException(f"{said['out']} was not written: nothing was decided in time; give a longer --limit")


def _compare(said: dict[str, Any]) -> None:
    from cluster.offline.plan.estimate import CAVEAT
    from cluster.offline.plan.whatif import WhatIfTerms, against, as_json, estimates, told
    from cluster.offline.plan.written import plain
    from cluster.offline.sim.compare import Case
    from cluster.offline.sim.fleet import models_of, with_kv_blocks
    from cluster.spec import load_spec

    _need(said, "source", "ttft_s", "tpot_s")
    load = _load(said)
    cases = []
    for path in said["pair"]:
        spec = with_kv_blocks(load_spec(path))
        link = "node" if said["network"] == "slow" else "cross"
        cases.append(Case(Path(path).name, spec, models_of(spec, source=said["costs"], link=link)))
    rate = said["rate"] or load.source.rate
    if not rate > 0.0:
        raise click.UsageError("the workload has no rate of its own; give one with --rate")
    seeds = tuple(range(said["seeds"]))
    terms = WhatIfTerms(
        load, positive_slo(said["ttft_s"], said["tpot_s"]), rate, said["target"], said["requests"], seeds
    )
    first = estimates(cases, terms)
    _first([f"{CAVEAT}.", *(f"  {each.told}" for each in first)], said["as_json"])
    (left, right), ended_by = _search(
        said, PLACING_S, lambda budget, show: against(cases[0], cases[1], terms, budget.each, show.update)
    )
    value = {**as_json(left, right, terms), "estimates": plain(first)}
    _tell(said, told(left, right, terms), value, ended_by)


def _buy(said: dict[str, Any]) -> None:
    from cluster.offline.plan.asked import PlanError
    from cluster.offline.plan.bought import as_json, estimated, told
    from cluster.offline.plan.buyer import Instance, LengthRanges, answers, instances_of, least, span
    from cluster.offline.plan.load import PlanLoad

    _need(said, "model", "hardware", "prompt", "output")
    lengths = LengthRanges(span(said["prompt"], "--prompt"), span(said["output"], "--output"))
    users = _users(said["users"])
    said["ttft_s"], said["tpot_s"] = said["ttft_s"] or TTFT_S, said["tpot_s"] or TPOT_S
    load = PlanLoad.of(lengths.workload())
    names = [name.strip() for name in said["hardware"].split(",") if name.strip()]
    kinds = [_asked(said | {"hardware": name}, load, said["gpus"] or least(said["model"], name)) for name in names]
    instances: list[Instance] = []
    refused = []
    for asked in kinds:
        try:
            instances += instances_of(asked, lengths)
        except PlanError as error:
            refused.append(f"{', '.join(asked.hardware)}: {error}")
    if not instances:
        raise PlanError("; ".join(refused) or "--hardware names no kind of GPU")
    first = [one.estimate for one in instances]
    _first([*estimated(kinds[0], lengths, first), *(f"  {each}" for each in refused)], said["as_json"])
    found, ended_by = _search(said, BUYING_S, lambda budget, show: answers(instances, users, budget.each, show.update))
    value = {**as_json(kinds[0], lengths, found), "does_not_fit": refused}
    _tell(said, told(kinds[0], lengths, found), value, ended_by)


def _users(text: str) -> list[int]:
    try:
        users = [int(each) for each in text.split(",")]
    except ValueError:
        users = [0]
    if not users or min(users) < 1 or max(users) > 10_000:
        raise click.UsageError(f"--users is {text!r}; it must be numbers from 1 to 10000, as {USERS}")
    return users
