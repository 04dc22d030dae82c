"""What one client can take of the gRPC port: connections, their time without a word or a call, and message sizes."""

import asyncio

import pytest

from cluster.frontend.grpc import server
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.wire import MAX_REQUEST_BYTES
from tests.frontend.grpc.conftest import OpenClient


async def connected(client: AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = client.endpoint.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ends(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(30.0):
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass


async def test_a_silent_connection_is_closed(open_client: OpenClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "OPENING_S", 0.2)
    client = await open_client()
    reader, writer = await connected(client)
    await ends(reader)
    writer.close()
    assert (await client.complete("hello", max_tokens=1)).text == "a"


async def test_an_idle_connection_is_closed_and_its_client_reconnects(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    client = await open_client()
    reader, writer = await connected(client)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # and empty settings
    for _ in range(3):
        assert (await client.complete("hello", max_tokens=1)).text == "a"
        await asyncio.sleep(0.4)
    await ends(reader)
    writer.close()


async def test_connections_above_the_limit_are_closed(open_client: OpenClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    client = await open_client()
    assert (await client.complete("hello", max_tokens=1)).text == "a"
    strangers = [await connected(client) for _ in range(8)]
    done, _ = await asyncio.wait([asyncio.create_task(reader.read()) for reader, _ in strangers], timeout=1.0)
    assert len(done) >= 6
    assert (await client.complete("hello", max_tokens=1)).text == "a"
    for _, writer in strangers:
        writer.close()


async def test_a_request_that_is_too_large_is_refused_with_advice(client: AsyncClient) -> None:
    with pytest.raises(DiptychError, match="at most 16 MiB; send a shorter prompt, or a batch in parts") as refused:
        await client.complete("a" * (MAX_REQUEST_BYTES + 1))
    assert refused.value.code == "RESOURCE_EXHAUSTED"
