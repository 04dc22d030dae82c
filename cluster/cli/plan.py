"""`diptych plan`: which cluster for which load; two clusters compared; and the buyer's question."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.screen import print_json, progress_bar, say

if TYPE_CHECKING:
    from cluster.plan.asked import Asked
    from cluster.plan.load import Load
    from cluster.scoring.goodput import Map
    from workers.request import SLO

TTFT_S, TPOT_S = 1.0, 0.05  # the buyer's promise, unless told
USERS = "1,8,64"


@click.command()
@click.option("--model", metavar="NAME", help="A model's name, such as llama-3-8b, or the folder of its config.json.")
@click.option("--hardware", metavar="H[,H2]", help="Kinds of GPU, such as a100-80gb,h100-80gb.")
@click.option("--gpus", type=click.IntRange(1, 4096), help="At most so many in all.")
@click.option("--nodes", type=click.IntRange(1), help="On so many equal nodes; else as the data sheet has them.")
@click.option("--workload", "source", metavar="SPEC", help="A trace file, or such as poisson:rate=4,lengths=mixed.")
@click.option("--own-times", is_flag=True, help="Keep the workload's own gaps and prefixes; else Poisson arrivals.")
@click.option("--rate", type=float, help="Requests a second to serve; without it, the most goodput is looked for.")
@click.option("--ttft", "ttft_s", type=float, metavar="S", help="Promise: seconds to the first token.")
@click.option("--tpot", "tpot_s", type=float, metavar="S", help="Promise: seconds for each token after it.")
@click.option("--target", type=float, default=0.9, show_default=True, help="Share of requests that must have both.")
@click.option(
    "--objective", type=click.Choice(("gpus", "cost", "power", "throughput")), default="gpus", show_default=True
)
@click.option("--network", type=click.Choice(("fast", "slow")), default="fast", show_default=True, help="Across nodes.")
@click.option("--source", "costs", default="best", show_default=True, help="Of step times: best, roofline, vidur, ...")
@click.option("--what-if", "pair", nargs=2, type=click.Path(dir_okay=False), help="Two cluster files to compare.")
@click.option("--prompt", metavar="N[-M]", help="The buyer's question: tokens of a prompt.")
@click.option("--output", metavar="N[-M]", help="The buyer's question: tokens of an answer.")
@click.option("--users", default=USERS, show_default=True, help="The buyer's question: how many at once.")
@click.option("--machines", type=click.IntRange(2), help="Splitwise's provisioning: at most so many of 8 GPUs.")
@click.option("--requests", type=click.IntRange(10, 100_000), default=300, show_default=True, help="Of one run.")
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--processes", type=click.IntRange(1), help="How many to use (all cores).")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan as a cluster YAML.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def plan(**said: Any) -> None:
    """Find the cluster for a load: pools, parallelism, replicas and chunk sizes, or not to disaggregate at all.

    Everything is simulated with the shipped scheduling code; nothing needs a GPU. With two files (--what-if) they are
    compared. With --prompt and --output the answer is what one instance gives: TTFT, TPOT and throughput apart. With
    --machines, prompt and token machines are provisioned as Splitwise does.

    \b
    Examples:
      diptych plan --model opt-13b --hardware a100-80gb --gpus 4 --nodes 1 --ttft 0.2 --tpot 0.1 \\
          --workload poisson:rate=4,lengths=100-1500/10-400,count=2000 -o plan.yaml
      diptych plan --model llama-2-70b --hardware a100-80gb,h100-80gb --gpus 64 --rate 12 --objective cost \\
          --workload AzureLLMInferenceTrace_conv.csv.gz --ttft 1 --tpot 0.1
      diptych plan --what-if a.yaml b.yaml --workload poisson:rate=4,lengths=mixed,count=500 --ttft 1 --tpot 0.1
      diptych plan --model llama-3-8b --hardware h100-80gb,l4 --prompt 1500-2000 --output 500
    """
    from cluster.plan.asked import PlanError

    modes = {
        "--what-if": bool(said["pair"]),
        "--prompt and --output": bool(said["prompt"] or said["output"]),
        "--machines": said["machines"] is not None,
    }
    if sum(modes.values()) > 1:
        raise click.UsageError(f"{' and '.join(name for name, on in modes.items() if on)}: ask one thing at a time")
    answer: Callable[..., None] = _place
    if said["pair"]:
        answer = _compare
    elif said["prompt"] or said["output"]:
        answer = _buy
    elif said["machines"] is not None:
        answer = _provision
    try:
        answer(said)
    except PlanError as error:
        raise click.ClickException(str(error)) from None


def _need(said: dict[str, Any], *names: str) -> None:
    missing = [f"--{name.removesuffix('_s')}" for name in names if said[name] is None]
    if missing:
        wanted = ["--workload" if name == "--source" else name for name in missing]
        raise click.UsageError(f"this question needs {', '.join(wanted)} as well")


@contextmanager
def _processes(said: dict[str, Any]) -> "Iterator[Map]":
    from cluster.sim.compare import processes

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with processes(said["processes"] or cores) as each:
        yield each


def _slo(said: dict[str, Any]) -> "SLO":
    from workers.request import SLO

    for name in ("ttft_s", "tpot_s"):
        if not 0.0 < said[name] < float("inf"):
            raise click.UsageError(f"--{name.removesuffix('_s')} is {said[name]}; a promise is above 0 seconds")
    return SLO(said["ttft_s"], said["tpot_s"])


def _load(said: dict[str, Any]) -> "Load":
    from cluster.plan.load import Load
    from cluster.workload.load import load_workload

    return Load.of(load_workload(said["source"]), said["own_times"])


def _asked(said: dict[str, Any], load: "Load", gpus: int) -> "Asked":
    from cluster.plan.asked import Asked

    return Asked(
        model=said["model"],
        hardware=tuple(name.strip() for name in said["hardware"].split(",") if name.strip()),
        gpus=gpus,
        load=load,
        slo=_slo(said),
        nodes=said["nodes"],
        rate=said["rate"],
        target=said["target"],
        objective=said["objective"],
        network=said["network"],
        requests=said["requests"],
        seeds=tuple(range(said["seeds"])),
        source=said["costs"],
    )


def _tell(lines: list[str], value: Any, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        click.echo("\n".join(lines))


def _place(said: dict[str, Any]) -> None:
    from cluster.plan.placement import Placement
    from cluster.plan.verdict import judged
    from cluster.plan.written import as_json, described, write_plan

    _need(said, "model", "hardware", "gpus", "source", "ttft_s", "tpot_s")
    asked = _asked(said, _load(said), said["gpus"])
    with _processes(said) as each, progress_bar() as tell:
        searched = Placement(asked, each, tell).search()
    verdict = judged(asked, searched.options)
    _tell(described(asked, searched, verdict), as_json(asked, searched, verdict), said["as_json"])
    if said["out"] is not None:
        write_plan(said["out"], asked, searched, verdict)
        say(f"written to {said['out']}; start it with: diptych serve -f {said['out']}")


def _compare(said: dict[str, Any]) -> None:
    from cluster.plan.whatif import Terms, against, as_json, told
    from cluster.sim.compare import Case
    from cluster.sim.fleet import models_of
    from cluster.spec import load_spec

    _need(said, "source", "ttft_s", "tpot_s")
    load = _load(said)
    cases = []
    for path in said["pair"]:
        spec = load_spec(path)
        link = "node" if said["network"] == "slow" else "cross"
        cases.append(Case(Path(path).name, spec, models_of(spec, source=said["costs"], link=link)))
    rate = said["rate"] or load.source.rate
    if not rate > 0.0:
        raise click.UsageError("the workload has no rate of its own; give one with --rate")
    seeds = tuple(range(said["seeds"]))
    terms = Terms(load, _slo(said), rate, said["target"], said["requests"], seeds)
    with _processes(said) as each, progress_bar() as tell:
        tell("simulating both", 0, None)
        left, right = against(cases[0], cases[1], terms, each)
    _tell(told(left, right, terms), as_json(left, right, terms), said["as_json"])


def _buy(said: dict[str, Any]) -> None:
    from cluster.plan.bought import as_json, told
    from cluster.plan.buyer import Lengths, answers, least, span
    from cluster.plan.load import Load

    _need(said, "model", "hardware", "prompt", "output")
    lengths = Lengths(span(said["prompt"], "--prompt"), span(said["output"], "--output"))
    try:
        users = [int(each) for each in said["users"].split(",")]
    except ValueError:
        users = [0]
    if not users or min(users) < 1 or max(users) > 10_000:
        raise click.UsageError(f"--users is {said['users']!r}; it must be numbers from 1 to 10000, as {USERS}")
    said["ttft_s"], said["tpot_s"] = said["ttft_s"] or TTFT_S, said["tpot_s"] or TPOT_S
    load = Load.of(lengths.workload())
    names = [name.strip() for name in said["hardware"].split(",") if name.strip()]
    kinds = [_asked(said | {"hardware": name}, load, said["gpus"] or least(said["model"], name)) for name in names]
    with _processes(said) as each, progress_bar() as tell:
        found = []
        for number, asked in enumerate(kinds):
            tell("simulating each kind", number, len(kinds))
            found += answers(asked, lengths, users, each)
    _tell(told(kinds[0], lengths, found), as_json(kinds[0], lengths, found), said["as_json"])


def _provision(said: dict[str, Any]) -> None:
    from cluster.plan.provision import as_json, provision, told_of

    _need(said, "model", "hardware", "source")
    machines = said["machines"]
    said["ttft_s"], said["tpot_s"] = said["ttft_s"] or TTFT_S, said["tpot_s"] or TPOT_S
    asked = _asked(said, _load(said), 8 * machines)
    with _processes(said) as each, progress_bar() as tell:
        found = provision(asked, machines, each, lambda what: tell(what, 0, None))
    _tell(told_of(asked, found), as_json(asked, found), said["as_json"])
