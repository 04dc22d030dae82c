"""A TCP relay between client and server that cuts its connections, as a proxy or a network does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """On a free port of the loopback. `target` may change; `cut` aborts every connection, mid-word."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.endpoint = ""
        self.num_connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        host, _, port = self.target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        await asyncio.gather(_pass(reader, back), _pass(there, writer))
        self._writers -= both


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()


@asynccontextmanager
async def relayed(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    server = await asyncio.start_server(relay.relay, "127.0.0.1", 0)
    relay.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        relay.cut()
        await asyncio.sleep(0)
