"""`diptych serve`: runs a cluster from a YAML file or a model's name until Ctrl-C."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.launch import (
    check_servers,
    spec_to_serve,
    with_default_http,
    with_gateway,
)
from cluster.cli.lifetime import GONE, GRACE, run, running_cluster
from cluster.cli.local_servers import announced
from cluster.cli.options import PORT, GroupedCommand, gateway_file_options, grouped, seconds
from cluster.cli.screen import progress_bar

if TYPE_CHECKING:
    from cluster.serving import Serving
    from cluster.spec import ClusterSpec

cluster_option = grouped("Cluster")
server_option = grouped("Server")
REPLICAS = click.IntRange(1, 1024)


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@cluster_option("-f", "--file", metavar="YAML", help="Cluster file, see docs/reference/configuration.md.")
@cluster_option("--prefill-replicas", type=REPLICAS, metavar="N", help="Prefill workers. Not with -f. [default: 1]")
@cluster_option("--decode-replicas", type=REPLICAS, metavar="N", help="Decode workers. Not with -f. [default: 1]")
@cluster_option(
    "--tensor-parallel-size", "-tp", type=REPLICAS, metavar="N",
    help="Ranks (GPUs or processes) that share each layer of a worker. Not with -f. [default: 1]",
)  # fmt: skip
@cluster_option("--runtime", type=click.Choice(["ray", "local"]), default="ray",
    help="local: everything in this process, for debugging.")  # fmt: skip
@server_option("--port", type=PORT, help="gRPC port, 0 for any free one. [default: 50051]")
@server_option(
    "--http-port", type=PORT,
    help="HTTP port (OpenAI API), 0 for any free one. [default: 8000 when fastapi and uvicorn are installed; another "
    "free port when 8000 is in use; none when RAY_ADDRESS is set]",
)  # fmt: skip
@server_option("--no-http", is_flag=True, help="Serve gRPC only.")
@server_option("--no-gateways", is_flag=True, help="Start only the workers; `diptych gateway` adds gateways.")
@seconds("--grace", GRACE, 10.0, least=0.0, option=server_option)
@server_option("--tool-call-parser", metavar="NAME",
    help="How the model writes tool calls, see docs/http.md. [default: as its chat template shows]")  # fmt: skip
@server_option("--reasoning-parser", metavar="NAME",
    help="How the model marks its reasoning, see docs/http.md. [default: as its chat template shows]")  # fmt: skip
@server_option("--log-format", type=click.Choice(["text", "json"]), help="Log format of every process (to stderr).")
@gateway_file_options
def serve(
    model: str | None,
    file: str | None,
    port: int | None,
    http_port: int | None,
    no_http: bool,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    log_format: str | None,
    grace_s: float,
    no_gateways: bool,
    runtime: str,
    files: dict[str, Any],
    **sizes: int | None,
) -> None:
    """Serve MODEL, or the cluster of a YAML file, until Ctrl-C.

    MODEL is a short name (`diptych models list`), a folder in Hugging Face layout, a .gguf file, or a hub id
    (owner/name). Without a file the cluster has one prefill and one decode worker, on this machine's GPUs if it has
    any. With -f, MODEL replaces the file's model.

    Joins the Ray cluster of RAY_ADDRESS, or starts Ray on this machine. When everything is ready it prints
    `ready: grpc://HOST:PORT` and `ready: http://HOST:PORT/v1` (with TLS: grpcs and https).

    \b
    Example:
      diptych serve smollm2-135m
      diptych serve smollm2-135m --prefill-replicas 1 --decode-replicas 2 --http-port 8080
      diptych serve -f examples/laptop.yaml --port 50051
      diptych serve --tls-cert-file cert.pem --tls-key-file key.pem --api-keys-file keys
    """
    from cluster.runtime.logs import configure_logging

    if no_gateways and runtime == "local":
        raise click.UsageError("--no-gateways: gateways join through Ray; leave --runtime local out")
    if no_http and http_port is not None:
        raise click.UsageError("--no-http and --http-port exclude each other")
    spec = spec_to_serve(file, model, **sizes)
    parsers = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
    changes = files | {"grpc_port": port, "http_port": http_port} | parsers
    spec = with_gateway(spec, **{key: value for key, value in changes.items() if value is not None})
    if no_http:
        spec = with_gateway(spec, http_port=None)
    elif http_port is None and not no_gateways:
        spec = with_default_http(spec, click.echo)
    if log_format is not None:
        spec = replace(spec, logs=replace(spec.logs, format=log_format))
    configure_logging(spec.logs, "serve")
    if not no_gateways:
        check_servers(spec)
    check_pools(spec, file, runtime)
    try:
        run(_serve(spec, runtime, grace_s, gateways=not no_gateways))
    except KeyboardInterrupt:
        click.echo("closed")  # the normal end


def check_pools(spec: "ClusterSpec", file: str | None, runtime: str) -> None:
    """Fetch the models and check the pools against them before workers start. Raises `SpecError`."""
    from cluster.precheck import check_devices, check_model, check_readers
    from cluster.spec import SpecError
    from cluster.spec_file import located

    if not spec.loads_models:
        return
    try:
        if runtime == "local" or "RAY_ADDRESS" not in os.environ:
            check_devices(spec)
        check_readers(spec)
        for model in spec.models:
            check_model(spec, fetch_model(model), model)
    except SpecError as error:
        raise SpecError(located(file, Path(file).read_text(), str(error)) if file else str(error)) from None


def fetch_model(model: str) -> Path:
    """Download a model to this host, with a progress bar. Workers on other hosts download it themselves."""
    from workers.model.store import resolve

    with progress_bar() as progress:
        return resolve(model, progress).path


async def _serve(spec: "ClusterSpec", runtime: str, grace_s: float, *, gateways: bool) -> None:
    async with running_cluster(spec, runtime, click.echo, gateways=gateways, grace_s=grace_s) as serving:
        if not gateways:
            click.echo(f"ready: the workers of {spec.name}; `diptych gateway` adds gateways")
            await _until_gone(serving)
        for endpoint in serving.endpoints:
            click.echo(f"ready: {spec.gateway.grpc_scheme}://{endpoint}")
        for url in serving.http_urls:
            click.echo(f"ready: {url}/v1")
            click.echo(f"  in a browser: {url}/ui")
        with announced(f"{spec.gateway.grpc_scheme}://{serving.endpoint}"):
            await _until_gone(serving)


async def _until_gone(serving: "Serving") -> None:
    await serving.wait_closed()
    raise click.ClickException(GONE)
