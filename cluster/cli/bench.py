"""`diptych bench`: a workload against a running cluster, judged like a simulated one."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.comparison import positive_slo, tell, write
from cluster.cli.screen import say
from cluster.cli.talk import ENDPOINT

if TYPE_CHECKING:
    from cluster.scoring.records import Run
    from cluster.workload.arrivals import Workload
    from workers.request import SLO


@click.command()
@ENDPOINT
@click.option("--workload", "source", required=True, metavar="SOURCE", help="A trace file, or such as poisson:rate=4.")
@click.option("--ttft", "ttft_s", type=float, metavar="S", help="Promise: seconds to the first token.")
@click.option("--tpot", "tpot_s", type=float, metavar="S", help="Promise: seconds for each token after it.")
@click.option("--deadline", "deadline_s", type=float, default=300.0, show_default=True, help="Of one request.")
@click.option("--in-flight", type=click.IntRange(1), default=256, show_default=True, help="More are refused here.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is drawn.")
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), help="Report, pictures, trace go here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of tables.")
def bench(
    endpoint: str,
    source: str,
    ttft_s: float | None,
    tpot_s: float | None,
    deadline_s: float,
    in_flight: int,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Send a workload to a running cluster, each request at its time, whatever became of those before it.

    The workload, the figures, the report and the trace for ui.perfetto.dev are those of `diptych simulate`.

    \b
    Example:
      diptych bench --workload poisson:rate=0.5,count=40,lengths=64-256/32 --ttft 2 --tpot 0.1 -o bench-out
    """
    from cluster.report.compared import Compared
    from cluster.scoring.figures import figures
    from cluster.workload.load import load_workload

    slo = positive_slo(ttft_s, tpot_s)
    if not 0.0 < deadline_s < float("inf"):
        raise click.UsageError(f"--deadline is {deadline_s}; it is above 0 seconds")
    workload = load_workload(source, seed=seed)
    run = asyncio.run(_drive(endpoint, workload, slo, deadline_s, in_flight, seed))
    compared = [Compared(run.system, figures(run, slo), run=run)]
    tell(compared, as_json)
    if out is not None:
        write(compared, out, "Benchmark", source)


async def _drive(
    endpoint: str, workload: "Workload", slo: "SLO", deadline_s: float, in_flight: int, seed: int
) -> "Run":
    from cluster.api.client import DiptychClient
    from cluster.bench.load import Load, drive_cluster

    async with DiptychClient(endpoint) as client:
        view = (await client.status()).view
        if view.model is None:
            raise click.ClickException(f"{view.name} at {endpoint} is still loading its model; try again later")
        load = Load(view.model.vocab_size, deadline_s, in_flight, seed, slo, view.name)
        say(f"{len(workload.arrivals)} requests in {workload.duration_s:.0f} s to {view.name} at {endpoint}")
        return await drive_cluster(client, workload, load)
