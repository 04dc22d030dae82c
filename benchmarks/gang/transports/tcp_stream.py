"""The transport of gangs: length-prefixed frames over asyncio TCP streams."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gang.transports import DEADLINE_S, Compute, Start


class StreamDelivery:
    def __init__(
        self, pid: int, server: asyncio.Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._server = server
        self._reader = reader
        self._writer = writer

    async def deliver(self, plan: bytes) -> bytes:
        _write(self._writer, plan)
        async with asyncio.timeout(DEADLINE_S):
            return await _read(self._reader)

    def close(self) -> None:
        self._writer.close()
        self._server.close()


async def lead(start: Start) -> StreamDelivery:
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    connected = asyncio.get_running_loop().create_future()

    def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set_result((reader, writer))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    pid = start(str(server.sockets[0].getsockname()[1]))
    async with asyncio.timeout(DEADLINE_S * 10):
        reader, writer = await connected
    return StreamDelivery(pid, server, reader, writer)


def serve(address: str, compute: Compute) -> None:
    asyncio.run(_serve(address, compute))


async def _serve(address: str, compute: Compute) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        while True:
            try:
                data = await _read(reader)
            except asyncio.IncompleteReadError:
                return
            _write(writer, await loop.run_in_executor(thread, compute, data))


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
