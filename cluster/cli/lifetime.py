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
    spec: "ClusterSpec", runtime: str, progress: Callable[[str], None]
) -> AsyncIterator["Serving"]:
    """A cluster with its gRPC door open; closed at the end, whatever the end is."""
    from cluster.api.server import open_door
    from cluster.serving import serve

    serving = await serve(spec, runtime=runtime, door=open_door, progress=progress)
    try:
        _cancel_on_terminate()  # again: Ray takes the signal for itself when it starts
        yield serving
    finally:
        progress("closing")
        await serving.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end. Ctrl-C and SIGTERM cancel the work, and its `finally`s run. Raises KeyboardInterrupt then."""

    async def guarded() -> None:
        _cancel_on_terminate()
        await work

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _cancel_on_terminate() -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)


def check_port(spec: "ClusterSpec") -> None:
    """Raise OSError now if the gateway's port is taken here, rather than after the model is loaded."""
    host, port = spec.gateway.host, spec.gateway.grpc_port
    if port == 0 or "RAY_ADDRESS" in os.environ:
        return
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            where = f"cannot listen on {host}:{port} ({error.strerror})"
            raise OSError(error.errno, f"{where}; choose another port with --port (0: any free one)") from None


def with_port(spec: "ClusterSpec", port: int) -> "ClusterSpec":
    return replace(spec, gateway=replace(spec.gateway, grpc_port=port))
