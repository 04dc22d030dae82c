"""The virtual loop's network: listeners by port, and pairs of pipes. Bytes arrive at once, in order.

Behind asyncio's streams there is no difference to sockets, so protocols run with their real frames and handshakes.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

FIRST_PORT = 1024

Factory = Callable[[], asyncio.Protocol]


class Network:
    """Owned by its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: dict[int, VirtualListener] = {}
        self._next_port = FIRST_PORT

    def listen(self, factory: Factory, port: int) -> "VirtualListener":
        """Raises OSError when the port is taken."""
        if port == 0:
            port = self._next_port
            self._next_port += 1
        if port in self._listeners:
            raise OSError(f"port {port} is in use")
        listener = self._listeners[port] = VirtualListener(self, factory, port)
        return listener

    def connect(self, factory: Factory, port: int) -> tuple["Pipe", asyncio.Protocol]:
        """Raises ConnectionRefusedError when nothing listens."""
        listener = self._listeners.get(port)
        if listener is None:
            raise ConnectionRefusedError(f"nothing listens on port {port}")
        client, server = factory(), listener.factory()
        near, far = Pipe(self._loop, client), Pipe(self._loop, server)
        near.peer, far.peer = far, near
        server.connection_made(far)
        client.connection_made(near)
        return near, client

    def forget(self, port: int) -> None:
        self._listeners.pop(port, None)


class VirtualListener:
    """The result of `create_server`. `sockets[0].getsockname()` has the port, as with a real server."""

    def __init__(self, network: Network, factory: Factory, port: int) -> None:
        self.factory = factory
        self._network = network
        self._port = port

    @property
    def sockets(self) -> tuple["VirtualListener", ...]:
        return (self,)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def dup(self) -> AbstractContextManager["VirtualListener"]:
        return nullcontext(self)

    def listen(self, backlog: int) -> None:
        """Nobody waits."""

    def close(self) -> None:
        self._network.forget(self._port)

    async def wait_closed(self) -> None:
        """Closed at once."""


class Pipe(asyncio.Transport):
    """One end of a connection. A paused reader's bytes wait here, without a bound."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.peer: Pipe | None = None
        self._loop = loop
        self._protocol = protocol
        self._closing = False
        self._paused = False
        self._waiting: deque[bytes | None] = deque()  # bytes that have arrived; None: the end

    def write(self, data: Any) -> None:
        if not self._closing and self.peer is not None:
            self._loop.call_soon(self.peer._receive, bytes(data))

    def _receive(self, data: bytes | None) -> None:
        self._waiting.append(data)
        self._deliver()

    def _deliver(self) -> None:
        while self._waiting and not self._paused and not self._closing:
            data = self._waiting.popleft()
            if data is not None:
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._deliver)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon(self._protocol.connection_lost, None)
        if self.peer is not None:
            self._loop.call_soon(self.peer._receive, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing
