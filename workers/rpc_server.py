"""Serves a worker's calls to gateways and the controller, each on a connection of its own."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from kvtransfer.errors import PeerLost, TransportUnavailable
from kvtransfer.rpc.connection import RpcConnection
from kvtransfer.rpc.frames import FrameStream
from kvtransfer.rpc.listener import RpcListener
from kvtransfer.rpc.methods import answer
from kvtransfer.rpc.session import SessionStream, SessionTarget
from workers.request import EngineOutputs
from workers.rpc import WORKER_PROTOCOL, socket_name
from workers.worker import Worker

MAX_CALLERS = 1024  # gateways and the controller
ABSENT_S = 10.0  # a gateway without a connection for this long is gone, and its requests with it


class WorkerRpcServer:
    """Owned by a worker's process; `close` it after the worker.

    `worker` returns the `Worker`, or raises `WorkerClosed`.
    """

    def __init__(self, incarnation: str, secret: bytes, worker: Callable[[], Worker]) -> None:
        self._incarnation = incarnation
        self._worker = worker
        self._sessions: dict[str, SessionStream] = {}
        self._listener = RpcListener(WORKER_PROTOCOL.name, secret, self._admit, self._serve)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port. Raises OSError."""
        name = socket_name(self._incarnation) if sys.platform == "linux" else ""
        return await self._listener.start(host, port, name)

    async def close(self) -> None:
        """Send what is answered, and disconnect everybody."""
        await self._listener.close()

    def _admit(self, target: str) -> bytes:
        """Admit a new session, or one that was disconnected; returns how many of its frames have arrived."""
        asked = SessionTarget.decode(target)
        if asked.incarnation != self._incarnation:
            raise PeerLost(f"{asked.incarnation} has ended")
        if asked.connection:
            if (session := self._sessions.get(asked.session)) is None:
                raise PeerLost("the session has ended")
            return b"%d" % session.detach(asked.connection)
        if len(self._sessions) >= MAX_CALLERS:
            raise TransportUnavailable(f"{MAX_CALLERS} gateways are connected already")
        return b"0"

    async def _serve(self, target: str, stream: FrameStream) -> None:
        asked = SessionTarget.decode(target)
        if not asked.connection:
            await self._serve_session(asked.session, stream)
        else:
            self._sessions[asked.session].attach(stream, asked.received)
            await asyncio.shield(stream.ended)

    async def _serve_session(self, name: str, first: FrameStream) -> None:
        """Serve until the session ends: its caller closes it, or stays away for `ABSENT_S`."""
        session = self._sessions[name] = SessionStream(first, ABSENT_S)

        def on_outputs(message: EngineOutputs) -> None:
            connection.notify(message)

        async def on_call(request: Struct) -> Any:
            if type(request).__name__ == "subscribe":
                return await self._worker().subscribe(astuple(request)[0], on_outputs, session.drain)
            return await answer(self._worker(), request)

        connection = RpcConnection(session, WORKER_PROTOCOL, f"the caller at {first.peer_host}", on_call=on_call)
        try:
            await connection.run()
        finally:
            del self._sessions[name]
            await connection.close()
