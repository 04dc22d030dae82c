"""Length-prefixed frames over asyncio streams: over TCP, which crosses hosts, or over a Unix socket, which does not.

"rank blocks": the rank's compute thread reads the socket itself, so that no event loop of its process is in between.
"""

import asyncio
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gang.ways import DEADLINE_S, Compute, Start
from benchmarks.gang.ways.bare import converse


class Stream:
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


async def lead(way: str, start: Start) -> Stream:
    arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    arrived = asyncio.get_running_loop().create_future()

    def arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set_result((reader, writer))

    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        if way == "unix stream":
            address = str(Path(folder) / "socket")
            server = await asyncio.start_unix_server(arrive, address)
        else:
            server = await asyncio.start_server(arrive, "127.0.0.1", 0)
            address = str(server.sockets[0].getsockname()[1])
        pid = start(address)
        async with asyncio.timeout(DEADLINE_S * 10):
            reader, writer = await arrived
    return Stream(pid, server, reader, writer)


def serve(way: str, address: str, compute: Compute) -> None:
    if way == "tcp, rank blocks":
        with socket.create_connection(("127.0.0.1", int(address))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            converse(connection, compute)
    else:
        asyncio.run(_serve(way, address, compute))


async def _serve(way: str, address: str, compute: Compute) -> None:
    if way == "unix stream":
        reader, writer = await asyncio.open_unix_connection(address)
    else:
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
