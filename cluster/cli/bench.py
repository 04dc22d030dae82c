"""`diptych bench`: measures a running endpoint, or several configurations one after another."""

from pathlib import Path
from typing import Any

import click

from cluster.cli.options import (
    OUTPUT_FOLDER,
    SHARE,
    GroupedCommand,
    access_options,
    connection,
    endpoint_option,
    grouped,
    seconds,
)

workload = grouped("Load")
goodput = grouped("SLO and goodput")
compared = grouped("Comparison")
output = grouped("Output")
POSITIVE = click.FloatRange(0.0, 1e9, min_open=True)


@click.command(cls=GroupedCommand)
@click.argument("configurations", nargs=-1)
@endpoint_option("grpc://HOST:PORT, or http://HOST:PORT[/v1] of any OpenAI server (TLS: grpcs://, https://).")
@access_options
@connection(
    "--model", default="", show_default=False, metavar="NAME", help="Model to ask. [default: the only one there]"
)
@connection(
    "--api-key", default="", show_default=False, envvar="OPENAI_API_KEY", metavar="KEY",
    help="With http://. [default: $OPENAI_API_KEY]",
)  # fmt: skip
@connection(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With http://: folder of the model's tokenizer.",
)
@workload("--workload", required=True, metavar="SOURCE", help="Trace file, or a generator: poisson:rate=4,count=100.")
@workload("--concurrency", type=click.IntRange(1, 4096), metavar="N", help="Keep N in flight, ignoring arrival times.")
@goodput("--goodput", "wants_goodput", is_flag=True, help="Search the highest rate that meets the SLO.")
@goodput("--attainment", "target", type=SHARE, default=0.9, help="Share of requests that must meet it.")
@goodput("--tolerance", type=POSITIVE, default=0.1, help="Relative precision of the search.")
@workload("--rates", metavar="R,R,...", help="Also run at these requests/s; with --compare, at these only.")
@compared("--compare", is_flag=True, help="Measure CONFIGURATIONS (cluster YAMLs or http:// endpoints) in turn.")
@compared("--resume", is_flag=True, help="Keep the runs in --out, and run only those that it lacks.")
@compared("--runtime", type=click.Choice(["ray", "local"]), default="ray", help="Runtime of each cluster.")
@goodput("--ttft", "ttft_s", type=float, metavar="SECONDS", help="SLO: time to first token.")
@goodput("--tpot", "tpot_s", type=float, metavar="SECONDS", help="SLO: time per output token after the first.")
@seconds("--deadline", "Time limit of a request.", 300.0, option=workload)
@workload("--in-flight", type=click.IntRange(1), default=256, help="Limit of requests; more fail.")
@workload("--seed", type=int, default=0, help="First seed of everything generated.")
@workload("--seeds", type=click.IntRange(1, 100), help="Number of seeds. [default: 3 with --goodput, 5 with --compare]")
@output("-o", "--out", type=OUTPUT_FOLDER, help="Output folder: report, pictures, JSON.")
@output("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def bench(
    configurations: tuple[str, ...], compare: bool, resume: bool, runtime: str, wants_goodput: bool, **options: Any
) -> None:
    """Measure a running cluster or any OpenAI server, or compare configurations.

    Each request is sent at its arrival time, whether or not earlier ones have finished (open loop). Workloads, figures,
    report and the trace for ui.perfetto.dev are the same as those of `diptych simulate`. See docs/benchmarking.md.

    \b
    Examples:
      diptych bench --workload poisson:rate=0.5,count=40,lengths=64-256/32 --ttft 2 --tpot 0.1 -o bench-out
      diptych bench --endpoint http://127.0.0.1:8000 --concurrency 8 --workload burst:count=64,lengths=128/64
      diptych bench --workload gamma:rate=1,cv=2,count=60,lengths=128/64 --ttft 2 --tpot 0.1 --goodput
      diptych bench --compare a.yaml b.yaml --workload poisson:rate=0.5,count=40,lengths=4x64/48+1024/48
    """
    from cluster.cli.bench_run import BenchOptions, compare_configurations, measure

    if configurations and not compare:
        raise click.UsageError(f"{configurations[0]} is a configuration; add --compare")
    if compare and (len(configurations) < 2 or len(set(configurations)) != len(configurations)):
        raise click.UsageError("--compare needs two or more configurations, each once: YAMLs or http:// endpoints")
    if compare and wants_goodput:
        raise click.UsageError("--compare excludes --goodput")
    if resume and not (compare and options["out"]):
        raise click.UsageError("--resume needs --compare and --out")
    if compare:
        compare_configurations(BenchOptions(mode="compare", **options), configurations, runtime, resume=resume)
    else:
        measure(BenchOptions(mode="goodput" if wants_goodput else "load", **options))
