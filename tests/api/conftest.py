"""The real server with a fake dispatcher behind it, and the real client in front."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cluster.api.client import DiptychClient
from cluster.api.server import GrpcDoor
from tests.api.fake import ByteTokenizer, FakeDispatcher, gateway_context

OpenClient = Callable[..., Awaitable[DiptychClient]]


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
async def open_client(dispatcher: FakeDispatcher) -> AsyncIterator[OpenClient]:
    """Opens a door (with these gateway options) and a client to it."""
    doors: list[GrpcDoor] = []
    clients: list[DiptychClient] = []

    async def open_one(**gateway: int) -> DiptychClient:
        doors.append(GrpcDoor(gateway_context(dispatcher, **gateway), ByteTokenizer))
        clients.append(DiptychClient(await doors[-1].open()))
        return clients[-1]

    yield open_one
    for client in clients:
        await client.close()
    for door in doors:
        await door.close(0)


@pytest.fixture
async def client(open_client: OpenClient) -> DiptychClient:
    return await open_client()
