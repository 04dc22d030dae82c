"""Serves a worker's calls to gateways and the controller, each on a connection of its own."""

from collections.abc import Callable
from typing import Any

import msgspec

from kvtransfer.errors import PeerLost, TransportUnavailable
from kvtransfer.rpc.connection import RpcConnection
from kvtransfer.rpc.frames import FrameStream
from kvtransfer.rpc.listener import RpcListener
from workers.request import Bundle
from workers.rpc import WORKER_PROTOCOL
from workers.stats import WorkerStats
from workers.worker import Worker

MAX_CALLERS = 1024  # gateways and the controller


class WorkerRpcServer:
    """Owned by a worker's process; `close` it after the worker.

    `worker` returns the `Worker`, or raises `WorkerClosed`. `on_stats` gets the statistics of every bundle.
    """

    def __init__(
        self, incarnation: str, secret: bytes, worker: Callable[[], Worker], on_stats: Callable[[WorkerStats], None]
    ) -> None:
        self._incarnation = incarnation
        self._worker = worker
        self._on_stats = on_stats
        self._listener = RpcListener(WORKER_PROTOCOL.name, secret, self._admit, self._serve)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port. Raises OSError."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Send what is answered, and disconnect everybody."""
        await self._listener.close()

    def _admit(self, incarnation: str) -> bytes:
        if incarnation != self._incarnation:
            raise PeerLost(f"{incarnation} has ended")
        if self._listener.num_callers >= MAX_CALLERS:
            raise TransportUnavailable(f"{MAX_CALLERS} gateways are connected already")
        return b""

    async def _serve(self, _: str, stream: FrameStream) -> None:
        def on_bundle(bundle: Bundle) -> None:
            self._on_stats(bundle.stats)
            connection.notify(bundle)

        async def on_call(request: msgspec.Struct) -> Any:
            method, args = type(request).__name__, msgspec.structs.astuple(request)
            if method == "subscribe":
                return await self._worker().subscribe(args[0], on_bundle, stream.drain)
            return await getattr(self._worker(), method)(*args)

        connection = RpcConnection(stream, WORKER_PROTOCOL, f"the caller at {stream.peer_host}", on_call=on_call)
        try:
            await connection.run()
        finally:
            await connection.close()
