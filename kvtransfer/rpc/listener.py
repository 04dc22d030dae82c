"""A listening port for asyncio: authenticates callers, and bounds those that are not authenticated yet.

Knows the handshake; the protocol decides who is admitted and what happens on an admitted connection.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvtransfer.errors import TransferError
from kvtransfer.rpc.frames import BROKEN, FrameStream, Kind
from kvtransfer.rpc.handshake import (
    HANDSHAKE_S,
    MAX_UNAUTHENTICATED,
    ListenerHandshake,
    Unauthenticated,
    require_secret,
)

logger = logging.getLogger(__name__)

BACKLOG = 128  # connections that wait for `accept`


class RpcListener:
    """`close` it. When an accept fails (no file descriptors), asyncio logs it once and tries again after a second.

    `admit(target)` returns the body of the welcome for a caller that knows the secret, or raises a `TransferError`,
    which the caller gets. `serve(target, stream)` then runs until the connection ends. Nothing runs between `admit` and
    the start of `serve`, so `num_callers` is exact in both.
    """

    def __init__(
        self,
        protocol: str,
        secret: bytes,
        admit: Callable[[str], bytes],
        serve: Callable[[str, FrameStream], Awaitable[None]],
        *,
        handshake_s: float = HANDSHAKE_S,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        self._protocol = protocol
        self._secret = require_secret(secret)
        self._admit = admit
        self._serve = serve
        self._handshake_s = handshake_s
        self._servers: list[asyncio.Server] = []
        self._unauthenticated: Unauthenticated[FrameStream] = Unauthenticated(max_unauthenticated)
        self._greeting: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def num_callers(self) -> int:
        """Number of authenticated connections."""
        return len(self._serving)

    @property
    def num_connections(self) -> int:
        return len(self._greeting) + len(self._serving)

    async def start(self, host: str, port: int = 0, name: str = "") -> int:
        """Listen; returns the port. `name`: for callers on this host, see `FrameStream.connect_on_host`."""
        loop = asyncio.get_running_loop()
        # asyncio's `backlog` is also how many accepts it tries, and how many failures it logs, before it waits
        server = await loop.create_server(self._stream, host, port, backlog=1)
        self._servers.append(server)
        if name:
            self._servers.append(await loop.create_unix_server(self._stream, f"\0{name}", backlog=1))
        for each in (each for server in self._servers for each in server.sockets):
            with each.dup() as listening:
                listening.listen(BACKLOG)
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def stop_accepting(self) -> None:
        """Close the port, and disconnect the callers that are not admitted yet."""
        for server in self._servers:
            server.close()
        await _cancel(self._greeting)

    async def close(self) -> None:
        """Disconnect all callers."""
        await self.stop_accepting()
        await _cancel(self._serving)
        for server in self._servers:
            await server.wait_closed()

    def _stream(self) -> FrameStream:
        return FrameStream(self._accepted)

    def _accepted(self, stream: FrameStream) -> None:
        task = asyncio.ensure_future(self._accept(stream))
        self._greeting.add(task)
        task.add_done_callback(lambda _: self._ended(task, stream))  # even if it is cancelled before it begins

    def _ended(self, task: "asyncio.Task[None]", stream: FrameStream) -> None:
        self._unauthenticated.discard(stream)
        self._greeting.discard(task)
        self._serving.discard(task)
        stream.abort()

    async def _accept(self, stream: FrameStream) -> None:
        task = asyncio.current_task()
        assert task is not None
        host = stream.peer_host
        displaced = self._unauthenticated.add(stream, host)
        if displaced is not None:
            displaced.abort()
        try:
            target = await self._greet(stream)
            self._unauthenticated.discard(stream)
            self._greeting.discard(task)
            self._serving.add(task)
            await self._serve(target, stream)
        except (*BROKEN, TimeoutError, TransferError) as error:
            text = "%s port: a caller from %s was refused: %s"
            logger.info(text, self._protocol, host, error or "it sent nothing", extra={"repeats": True})
        finally:
            await stream.close()

    async def _greet(self, stream: FrameStream) -> str:
        """The listener's half of the handshake; returns the caller's target."""
        handshake = ListenerHandshake(self._protocol, self._secret)
        stream.send(Kind.HANDSHAKE, 0, handshake.hello)
        async with asyncio.timeout(self._handshake_s):
            claim = await stream.receive_handshake()
        try:
            target = handshake.verify(claim)
            welcome = handshake.welcome(self._admit(target))
        except TransferError as error:
            stream.send(Kind.HANDSHAKE, 0, handshake.refusal(error))
            raise
        stream.send(Kind.HANDSHAKE, 0, welcome)
        return target


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tuple(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
