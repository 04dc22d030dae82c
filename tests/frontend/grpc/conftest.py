"""The real server with a fake dispatcher behind it, and the real client in front."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from cluster.frontend.grpc.server import GrpcServer
from diptych.client import AsyncClient
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.tokenizers import ByteTokenizer

OpenClient = Callable[..., Awaitable[AsyncClient]]


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
async def open_client(dispatcher: FakeDispatcher) -> AsyncIterator[OpenClient]:
    """Opens a server (with these gateway options) and a client to it."""
    servers: list[GrpcServer] = []
    clients: list[AsyncClient] = []

    async def open_one(**gateway: Any) -> AsyncClient:
        servers.append(GrpcServer(gateway_context(dispatcher, **gateway), ByteTokenizer))
        clients.append(AsyncClient(await servers[-1].open()))
        return clients[-1]

    yield open_one
    for client in clients:
        await client.close()
    for server in servers:
        await server.close(0)


@pytest.fixture
async def client(open_client: OpenClient) -> AsyncClient:
    return await open_client()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server in another thread, for callers that wait; it answers with the end of the prompt in capitals."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def open_server() -> tuple[GrpcServer, str]:
        dispatcher = FakeDispatcher(lambda request: bytes(request.prompt)[-12:].upper())
        server = GrpcServer(gateway_context(dispatcher), ByteTokenizer)
        return server, await server.open()

    server, address = asyncio.run_coroutine_threadsafe(open_server(), loop).result(10)
    yield address
    asyncio.run_coroutine_threadsafe(server.close(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
