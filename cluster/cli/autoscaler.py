"""`diptych autoscaler`: sets the replicas of each pool's StatefulSet to the pool's target."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.lifetime import run
from cluster.cli.options import FOLDER, GroupedCommand, reloading_client_options, seconds
from diptych.access import Access

if TYPE_CHECKING:
    from cluster.control.autoscaler.loop import Autoscaler


@click.command(cls=GroupedCommand)
@click.option("-f", "--file", "file", required=True, type=click.Path(exists=True, dir_okay=False), help="Cluster file.")
@click.option("--prefix", required=True, metavar="NAME", help="Each pool's StatefulSet is named NAME-POOL.")
@reloading_client_options
@seconds("--window", "Remove pods only after fewer have been enough for this long.", 30.0, least=0.0)
@seconds("--period", "Time between checks.", 5.0)
@click.option(
    "--service-account", "account", type=FOLDER, envvar="DIPTYCH_SERVICE_ACCOUNT",
    help="Folder with token, ca.crt and namespace. [default: where Kubernetes mounts it]",
)  # fmt: skip
@click.option("--health-port", type=click.IntRange(1, 65535), help="Port of /health and /ready. [default: none]")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Log format (to stderr).")
def autoscaler(
    file: str,
    prefix: str,
    endpoint: str,
    access: Callable[[], Access],
    window_s: float,
    period_s: float,
    account: Path | None,
    health_port: int | None,
    log_format: str | None,
) -> None:
    """Scale each pool's pods to its target number of workers; runs in a Kubernetes pod.

    For pools with replicas: {min, max} that are StatefulSets. The elastic policy or `diptych scale` sets the target.
    Runs until SIGTERM and survives failures of the gateway and the API server.

    \b
    Example:
      diptych autoscaler -f /etc/diptych/cluster.yaml --prefix llm-diptych --endpoint llm-diptych:50051
    """
    from dataclasses import replace

    from cluster.control.autoscaler.kubernetes import ACCOUNT, ScaleError, api_server
    from cluster.control.autoscaler.loop import Autoscaler
    from cluster.control.autoscaler.pods import Pods, scaled_pools
    from cluster.runtime.logs import configure_logging
    from cluster.spec_file import load_spec

    spec = load_spec(file)
    if not (pools := scaled_pools(spec)):
        raise click.UsageError(f"{file}: no pool may grow or shrink; write replicas: {{min: 1, max: 4}}")
    access()
    try:
        server = api_server(account or Path(ACCOUNT))
    except ScaleError as error:
        raise click.ClickException(str(error)) from None
    configure_logging(replace(spec.logs, format=log_format or spec.logs.format), "autoscaler")
    try:
        run(_run(Autoscaler(Pods(pools, window_s), server, endpoint, access, prefix, period_s), health_port))
    except KeyboardInterrupt:
        click.echo("closed")  # the normal end


async def _run(autoscaler: "Autoscaler", health_port: int | None) -> None:
    from cluster.control.autoscaler.loop import probed

    async with nullcontext() if health_port is None else probed(autoscaler, health_port):
        await autoscaler.run()
