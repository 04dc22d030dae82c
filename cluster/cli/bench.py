"""`diptych bench`: load on a running endpoint, or on several configurations in turn."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.address import DEFAULT, accessed, connection, default_endpoint
from cluster.cli.comparison import positive_slo
from cluster.cli.groups import GroupedCommand, grouped
from diptych.access import Access

if TYPE_CHECKING:
    from cluster.cli.benching import BenchOptions

workload = grouped("Load")
goodput = grouped("SLO and goodput")
compared = grouped("Comparison")
output = grouped("Output")
LENGTHS = "128/64"
SEEDS_OF_GOODPUT, SEEDS_OF_COMPARE = 3, 5


@click.command(cls=GroupedCommand)
@click.argument("configurations", nargs=-1)
@connection(
    "--endpoint",
    envvar="DIPTYCH_ENDPOINT",
    metavar="ADDRESS",
    callback=default_endpoint,
    help=f"grpc://HOST:PORT, or http://HOST:PORT[/v1] of any OpenAI server (TLS: grpcs://, https://). {DEFAULT}",
)
@accessed
@connection("--model", default="", metavar="NAME", help="With http://: model to ask. [default: the only one there]")
@connection(
    "--api-key", default="", envvar="OPENAI_API_KEY", metavar="KEY", help="With http://. [default: $OPENAI_API_KEY]"
)
@connection(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With http://: folder of the model's tokenizer.",
)
@workload("--workload", "source", metavar="SOURCE", help="Trace file, or a generator: poisson:rate=4,count=100.")
@workload(
    "--concurrency",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Keep N requests in flight, ignoring arrival times.",
)
@workload("--count", type=click.IntRange(1), metavar="N", help="Requests in all, with --concurrency and no --workload.")
@workload("--lengths", metavar="P/O", help=f"Prompt/output tokens, with --count. [default: {LENGTHS}]")
@goodput("--goodput", "wants_goodput", is_flag=True, help="Search the highest rate that meets the SLO.")
@goodput(
    "--attainment", "target", type=float, default=0.9, show_default=True, help="Share of requests that must meet it."
)
@goodput("--tolerance", type=float, default=0.1, show_default=True, help="Relative precision of the search.")
@workload("--rates", metavar="R,R,...", help="Also run at these requests/s; with --compare, at these only.")
@compared("--compare", is_flag=True, help="Measure CONFIGURATIONS (cluster YAMLs or http:// endpoints) in turn.")
@compared("--runtime", type=click.Choice(["ray", "local"]), default="ray", help="Runtime of each cluster.")
@goodput("--ttft", "ttft_s", type=float, metavar="SECONDS", help="SLO: time to first token.")
@goodput("--tpot", "tpot_s", type=float, metavar="SECONDS", help="SLO: time per output token after the first.")
@workload(
    "--deadline",
    "deadline_s",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of a request.",
)
@workload(
    "--in-flight",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Client-side limit of requests in flight; more fail.",
)
@workload("--seed", type=int, default=0, show_default=True, help="First seed of everything generated.")
@workload("--seeds", type=click.IntRange(1, 100), help="Number of seeds. [default: 3 with --goodput, 5 with --compare]")
@output("-o", "--out", type=click.Path(file_okay=False, path_type=Path), help="Output folder: report, pictures, JSON.")
@output("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def bench(
    configurations: tuple[str, ...],
    endpoint: str,
    access: Access,
    model: str,
    api_key: str,
    tokenizer: Path | None,
    source: str | None,
    concurrency: int | None,
    count: int | None,
    lengths: str | None,
    wants_goodput: bool,
    target: float,
    tolerance: float,
    rates: str | None,
    compare: bool,
    runtime: str,
    ttft_s: float | None,
    tpot_s: float | None,
    deadline_s: float,
    in_flight: int,
    seed: int,
    seeds: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure a running cluster or any OpenAI server, or compare configurations.

    Each request is sent at its arrival time, whether or not earlier ones have finished (open loop). Workloads, figures,
    report and the trace for ui.perfetto.dev are the same as those of `diptych simulate`. See docs/benchmarking.md.

    \b
    Examples:
      diptych bench --workload poisson:rate=0.5,count=40,lengths=64-256/32 --ttft 2 --tpot 0.1 -o bench-out
      diptych bench --endpoint http://127.0.0.1:8000 --concurrency 8 --count 64 --lengths 128/64
      diptych bench --workload gamma:rate=1,cv=2,count=60,lengths=128/64 --ttft 2 --tpot 0.1 --goodput
      diptych bench --compare a.yaml b.yaml --workload poisson:rate=0.5,count=40,lengths=4x64/48+1024/48
    """
    from cluster.cli import benching
    from cluster.cli.simulate import rates_of
    from cluster.offline.load.endpoint import Target

    _check_modes(configurations, compare, source, concurrency, count, lengths, wants_goodput, rates)
    if seeds is not None and not (compare or wants_goodput):
        raise click.UsageError("--seeds goes with --goodput or --compare; a single run has --seed")
    for name, value, most in (("--attainment", target, 1.0), ("--tolerance", tolerance, 1e3)):
        if not 0.0 < value <= most:
            raise click.UsageError(f"{name} is {value}; it is above 0 and at most {most:g}")
    if not 0.0 < deadline_s < float("inf"):
        raise click.UsageError(f"--deadline is {deadline_s}; it is above 0 seconds")
    slo = positive_slo(ttft_s, tpot_s)
    if wants_goodput and slo.ttft_s is None and slo.tpot_s is None:
        raise click.UsageError("--goodput needs an SLO: --ttft, --tpot, or both")
    wanted = seeds or (SEEDS_OF_COMPARE if compare else SEEDS_OF_GOODPUT if wants_goodput else 1)
    asked: BenchOptions = benching.BenchOptions(
        target=None if compare else Target(endpoint, model, api_key, tokenizer, access),
        source=source or f"burst:count={count or 1},lengths={lengths or LENGTHS}",
        concurrency=concurrency,
        slo=slo,
        deadline_s=deadline_s,
        in_flight=in_flight,
        seeds=tuple(range(seed, seed + wanted)),
        rates=rates_of(rates),
        out=out,
        as_json=as_json,
        access=access,
    )
    if compare:
        from cluster.offline.load.trials import kind_of

        servers = {each: kind_of(each)[1] for each in configurations if "://" in each}
        others = {each: Target(address, model, api_key, tokenizer, access) for each, address in servers.items()}
        benching.compare(asked, configurations, others, runtime)
    else:
        benching.load(asked, benching.Goal(target, tolerance) if wants_goodput else None)


def _check_modes(
    configurations: tuple[str, ...],
    compare: bool,
    source: str | None,
    concurrency: int | None,
    count: int | None,
    lengths: str | None,
    wants_goodput: bool,
    rates: str | None,
) -> None:
    """What does not go together. Raises `click.UsageError`."""
    if configurations and not compare:
        raise click.UsageError(f"{configurations[0]} is a configuration; add --compare")
    if compare and (len(configurations) < 2 or len(set(configurations)) != len(configurations)):
        raise click.UsageError("--compare needs two or more configurations, each once: YAMLs or http:// endpoints")
    if compare and wants_goodput:
        raise click.UsageError("--compare excludes --goodput")
    if source is None and (concurrency is None or count is None):
        raise click.UsageError("choose what to send: --workload SOURCE, or --concurrency N --count M")
    if source is not None and (count is not None or lengths is not None):
        extra = "--count" if count is not None else "--lengths"
        raise click.UsageError(f"the workload has its own {extra[2:]}; leave {extra} out")
    if concurrency is not None and (wants_goodput or rates is not None):
        raise click.UsageError("--concurrency has no rate; leave --goodput and --rates out")
