"""`diptych serve`: a cluster from a YAML file, until it is told to stop."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.address import filed
from cluster.cli.lifetime import check_doors, run, running_cluster, with_files, with_http, with_port
from cluster.cli.screen import progress_bar

if TYPE_CHECKING:
    from cluster.spec import ClusterSpec


@click.command()
@click.option("-f", "--file", metavar="YAML", help="The cluster's description; without it, one prefill + one decode.")
@click.option("--model", help="Serve this model instead: a name from `diptych models list`, a path, or owner/name.")
@click.option("--port", type=click.IntRange(0, 65535), help="gRPC port; 0 takes any free one.")
@click.option("--http-port", type=click.IntRange(0, 65535), help="HTTP port, see docs/http.md; 0 takes any free one.")
@filed
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Of every process; logs go to standard error.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long running requests may go on after Ctrl-C or SIGTERM; a second one cuts them.",
)
@click.option("--no-gateways", is_flag=True, help="Only the workers; `diptych gateway` brings the gateways.")
@click.option("--runtime", type=click.Choice(["ray", "local"]), default="ray", show_default=True)
def serve(
    file: str | None,
    model: str | None,
    port: int | None,
    http_port: int | None,
    log_format: str | None,
    grace_s: float,
    no_gateways: bool,
    runtime: str,
    files: dict[str, str],
) -> None:
    """Bring a cluster up and keep it until Ctrl-C. What runs then may end within --grace; a second Ctrl-C cuts it.

    Joins the Ray cluster of RAY_ADDRESS, or starts Ray on this machine. When everything is ready it says
    `ready: grpc://HOST:PORT`, and where HTTP is served as well `ready: http://HOST:PORT/v1`; with TLS it is grpcs and
    https.

    \b
    Example:
      diptych serve -f examples/laptop.yaml --port 50051
      diptych serve --tls-cert-file cert.pem --tls-key-file key.pem --api-keys-file keys
    """
    from cluster.runtime.logs import begin

    if no_gateways and runtime == "local":
        raise click.UsageError("--no-gateways: gateways join through Ray; leave --runtime local out")
    spec = _described(file)
    if model is not None:
        spec = spec.with_model(model)
    if port is not None:
        spec = with_port(spec, port)
    if http_port is not None:
        spec = with_http(spec, http_port)
    if log_format is not None:
        spec = replace(spec, logs=replace(spec.logs, format=log_format))
    spec = with_files(spec, files)
    begin(spec.logs, "serve")
    if not no_gateways:
        check_doors(spec)
    check_pools(spec, file, runtime)
    try:
        run(_serve(spec, runtime, grace_s, gateways=not no_gateways))
    except KeyboardInterrupt:
        click.echo("closed")  # the ordinary end


def _described(file: str | None) -> "ClusterSpec":
    if file is None:
        from cluster.spec import laptop_spec

        return laptop_spec()
    from cluster.spec import load_spec

    return load_spec(file)


def check_pools(spec: "ClusterSpec", file: str | None, runtime: str) -> None:
    """Fetch the model, and raise now what can be known of the pools without a worker, with the line of the file."""
    from cluster.precheck import check_devices, check_model, check_readers
    from cluster.spec import SpecError
    from cluster.spec_lines import located

    if spec.executor == "modelled":
        return
    try:
        if runtime == "local" or "RAY_ADDRESS" not in os.environ:
            check_devices(spec)
        check_readers(spec)
        check_model(spec, fetch_model(spec))
    except SpecError as error:
        raise SpecError(located(file, Path(file).read_text(), str(error)) if file else str(error)) from None


def fetch_model(spec: "ClusterSpec") -> Path:
    """Have the model here before workers start, with a bar to look at; on other hosts, workers fetch it themselves.

    Answers its folder.
    """
    from workers.model.store import resolve

    with progress_bar() as progress:
        return resolve(spec.model, progress).path


async def _serve(spec: "ClusterSpec", runtime: str, grace_s: float, *, gateways: bool) -> None:
    async with running_cluster(spec, runtime, click.echo, gateways=gateways, grace_s=grace_s) as serving:
        if not gateways:
            click.echo(f"ready: the workers of {spec.name}; `diptych gateway` opens its doors")
        for endpoint in serving.endpoints:
            click.echo(f"ready: {spec.gateway.grpc_scheme}://{endpoint}")
        for url in serving.http_urls:
            click.echo(f"ready: {url}/v1")
        await serving.wait_closed()
        raise click.ClickException("the cluster is gone: its controller does not answer any more")
