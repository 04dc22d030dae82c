"""`diptych gateway`: adds a gateway to a cluster that `diptych serve` started."""

import gc
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.launch import with_available_http, with_gateway
from cluster.cli.lifetime import GONE, GRACE, Interrupts, closing_line, run
from cluster.cli.local_servers import announced
from cluster.cli.options import PORT, GroupedCommand, gateway_file_options, seconds

if TYPE_CHECKING:
    from cluster.join import JoinedGateway
    from cluster.spec import ClusterSpec


@click.command(cls=GroupedCommand)
@click.option("--cluster", help="Name of the cluster. [default: the one served on this machine, else diptych]")
@click.option("--port", type=PORT, help="gRPC port, 0 for any free one. [default: the cluster's]")
@click.option("--http-port", type=PORT, help="HTTP port, 0 for any free one. [default: the cluster's, if any]")
@seconds("--grace", GRACE, 30.0, least=0.0)
@seconds("--wait", "Time to wait for the cluster and its model.", 600.0, least=0.0)
@gateway_file_options
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Log format (to stderr).")
def gateway(
    cluster: str | None,
    port: int | None,
    http_port: int | None,
    grace_s: float,
    wait_s: float,
    log_format: str | None,
    files: dict[str, Any],
) -> None:
    """Add a gateway to a running cluster, until Ctrl-C.

    It runs in this process, on a node of the cluster's Ray: that of RAY_ADDRESS, or the one that your `diptych serve`
    started on this machine, or another Ray of this machine. On Ctrl-C or SIGTERM it refuses new requests and lets
    running ones finish.

    \b
    Example:
      RAY_ADDRESS=HEAD:6379 diptych gateway --port 50052
    """
    try:
        run(_gateway(cluster, partial(_changed, port, http_port, files), grace_s, wait_s, log_format))
    except KeyboardInterrupt:
        click.echo("closed")  # the normal end


async def _gateway(
    named: str | None,
    change: Callable[["ClusterSpec"], "ClusterSpec"],
    grace_s: float,
    wait_s: float,
    log_format: str | None,
) -> None:
    from cluster.frontend.servers import open_servers
    from cluster.join import join, spec_and_models
    from cluster.runtime.logs import configure_logging
    from cluster.runtime.sessions import settle_join

    cluster = settle_join(named) or named or "diptych"
    from cluster.runtime.ray_nodes import await_controller
    from cluster.runtime.ray_start import join_ray

    name = f"gateway-{socket.gethostname()}"
    await join_ray()
    Interrupts()  # again, because Ray replaced the SIGTERM handler
    controller = await await_controller(cluster, wait_s)
    click.echo(f"joining {cluster}")
    spec, models = await spec_and_models(controller, wait_s)
    spec = change(spec)
    configure_logging(replace(spec.logs, format=log_format or spec.logs.format), name)
    joined = await join(name, spec, models, controller, open_servers)
    gc.freeze()  # see `cluster.runtime.ray`
    interrupts = Interrupts(serves=True)
    try:
        await _serve(joined, spec.gateway.grpc_scheme)
    finally:
        click.echo(closing_line(grace_s))
        await interrupts.run_close(joined.service.close(grace_s), joined.service.cancel_requests)


def _changed(port: int | None, http_port: int | None, files: dict[str, Any], spec: "ClusterSpec") -> "ClusterSpec":
    """The cluster's spec with the options of this command."""
    changes = files | {"grpc_port": port, "http_port": http_port}
    spec = with_gateway(spec, **{key: value for key, value in changes.items() if value is not None})
    return with_available_http(spec, click.echo) if http_port is None else spec


async def _serve(joined: "JoinedGateway", scheme: str) -> None:
    click.echo(f"ready: {scheme}://{joined.endpoint}")
    if joined.http_url:
        click.echo(f"ready: {joined.http_url}/v1")
    with announced(f"{scheme}://{joined.endpoint}"):
        await joined.wait_orphaned()
    raise click.ClickException(GONE)
