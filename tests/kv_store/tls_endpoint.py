"""A TLS endpoint in front of a server on this machine, for tests."""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from tests.frontend.http.certificates import Pair


@contextmanager
def tls_endpoint(to_port: int, pair: Pair) -> Iterator[int]:
    """Its port on 127.0.0.1. It runs on a thread, because clients block theirs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="tls-endpoint")
    thread.start()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", to_port)
        with suppress(OSError):
            await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))

    async def end() -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
