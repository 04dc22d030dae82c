"""Clusters that live as long as a command: up, and surely down again, also on Ctrl-C and SIGTERM."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what stands behind these is heavy
    from cluster.serving import Serving
    from cluster.spec import ClusterSpec


@asynccontextmanager
async def running_cluster(
    spec: "ClusterSpec", runtime: str, progress: Callable[[str], None], *, gateways: bool = True
) -> AsyncIterator["Serving"]:
    """A cluster with its doors open, if it has `gateways`; closed at the end, whatever the end is."""
    from cluster.doors import open_doors
    from cluster.serving import serve

    serving = await serve(spec, runtime=runtime, door=open_doors, progress=progress, gateways=gateways)
    try:
        cancel_on_terminate()  # again: Ray takes the signal for itself when it starts
        yield serving
    finally:
        progress("closing")
        await serving.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end. Ctrl-C and SIGTERM cancel the work, and its `finally`s run. Raises KeyboardInterrupt then."""

    async def guarded() -> None:
        cancel_on_terminate()
        await work

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def cancel_on_terminate() -> None:
    """Ctrl-C and SIGTERM cancel the task that calls this."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)


def check_doors(spec: "ClusterSpec") -> None:
    """Raise now if a gateway's port is taken here (OSError), a file of certificates or keys cannot be used (SpecError)
    or HTTP is not installed, rather than after the model is loaded. In a Ray of others, all this is elsewhere."""
    if spec.gateway.http_port is not None:
        from cluster.http import check_extra

        check_extra()
    for port, option in ((spec.gateway.grpc_port, "--port"), (spec.gateway.http_port, "--http-port")):
        if port and "RAY_ADDRESS" not in os.environ:
            _check_free(spec.gateway.host, port, option)
    if "RAY_ADDRESS" not in os.environ:
        from cluster.guard import Guard

        Guard(spec.gateway)


def _check_free(host: str, port: int, option: str) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            where = f"cannot listen on {host}:{port} ({error.strerror})"
            raise OSError(error.errno, f"{where}; choose another port with {option} (0: any free one)") from None


def with_port(spec: "ClusterSpec", port: int) -> "ClusterSpec":
    return replace(spec, gateway=replace(spec.gateway, grpc_port=port))


def with_files(spec: "ClusterSpec", files: dict[str, str]) -> "ClusterSpec":
    """Files of certificates and keys, by their names in the specification. Raises `SpecError`."""
    from cluster.spec import SpecError

    try:
        return replace(spec, gateway=replace(spec.gateway, **files))  # type: ignore[arg-type]
    except ValueError as error:
        raise SpecError(f"gateway: {error}") from None


def private(spec: "ClusterSpec") -> "ClusterSpec":
    """For nobody but this machine: any free port of the loopback, no HTTP, and so no guard."""
    alone = replace(spec.gateway, host="127.0.0.1", grpc_port=0, http_port=None)
    open_ = replace(alone, tls_cert_file=None, tls_key_file=None, tls_client_ca_file=None, api_keys_file=None)
    return replace(spec, gateway=open_)


def with_http(spec: "ClusterSpec", port: int) -> "ClusterSpec":
    return replace(spec, gateway=replace(spec.gateway, http_port=port))
