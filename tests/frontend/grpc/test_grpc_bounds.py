"""What one client can take of the gRPC port: connections, their time without a word or a call, and message sizes."""

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from cluster.frontend import connection_limits
from cluster.frontend.grpc import connection_limit, interceptors, sender, server, standard_services
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.wire import INFERENCE, MAX_REQUEST_BYTES
from tests.frontend.grpc.conftest import OpenClient

GENERATE = "/diptych.v1.InferenceService/Generate"


async def connected(
    client: AsyncClient, local_address: tuple[str, int] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = client.endpoint.rpartition(":")
    return await asyncio.open_connection(host, int(port), local_addr=local_address)


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
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 2)
    client = await open_client()
    assert (await client.complete("hello", max_tokens=1)).text == "a"
    strangers = [await connected(client) for _ in range(8)]
    done, _ = await asyncio.wait([asyncio.create_task(reader.read()) for reader, _ in strangers], timeout=1.0)
    assert len(done) >= 6
    assert (await client.complete("hello", max_tokens=1)).text == "a"
    for _, writer in strangers:
        writer.close()


async def test_one_address_cannot_hold_all_connections(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_ADDRESS", 3)
    monkeypatch.setattr(connection_limit, "COUNT_S", 0.05)
    client = await open_client()
    call = silent_call(client._channel, GENERATE)
    await call.wait_for_connection()
    strangers = [await connected(client, ("127.0.0.2", 0)) for _ in range(8)]
    ended = [asyncio.create_task(reader.read()) for reader, _ in strangers]
    async with asyncio.timeout(30.0):
        while sum(each.done() for each in ended) < 5:
            await asyncio.wait([each for each in ended if not each.done()], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.2)  # further counts
    assert sum(each.done() for each in ended) == 5
    assert not call.done() and (await client.complete("hello", max_tokens=1)).text == "a"
    for _, writer in strangers:
        writer.close()
    await asyncio.wait(ended)


def test_the_newest_connections_of_an_address_are_closed() -> None:
    with ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listening:
        limit = connection_limit.ConnectionLimit(2, listening.getsockname()[1])

        def connect() -> tuple[socket.socket, socket.socket]:
            client = opened.enter_context(socket.create_connection(listening.getsockname()))
            accepted = opened.enter_context(listening.accept()[0])
            limit.close_excess()
            client.setblocking(False)
            return client, accepted

        first, (second, _), third = connect(), connect(), connect()
        assert third[0].recv(1) == b""
        for each in *first, *third:
            each.close()
        for each in second, connect()[0]:
            with pytest.raises(BlockingIOError):
                each.recv(1)


async def test_a_request_that_is_too_large_is_refused_with_advice(client: AsyncClient) -> None:
    with pytest.raises(DiptychError, match="at most 16 MiB; send a shorter prompt, or a batch in parts") as refused:
        await client.complete("a" * (MAX_REQUEST_BYTES + 1))
    assert refused.value.code == "RESOURCE_EXHAUSTED"


def silent_call(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.stream_stream(method)()


async def code_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(10.0):
        return await call.code()


@pytest.mark.parametrize("method", [GENERATE, "/diptych.v1.InferenceService/Cancel", "/grpc.health.v1.Health/Check"])
async def test_a_call_whose_message_does_not_arrive_is_ended(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(interceptors, "MESSAGE_S", 0.2)
    async with grpc.aio.insecure_channel(client.endpoint) as channel:
        assert await code_of(silent_call(channel, method)) == grpc.StatusCode.DEADLINE_EXCEEDED
        empty = silent_call(channel, method)
        await empty.done_writing()
        assert await code_of(empty) == grpc.StatusCode.INVALID_ARGUMENT
    assert (await client.complete("hello", max_tokens=1)).text == "a"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def checks_without_window(count: int) -> bytes:
    """HTTP/2: a client that allows no byte of an answer, and so many health checks."""
    headers = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Check", ":authority": "h"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    block = b"".join(literal(name.encode(), value.encode()) for name, value in headers.items())
    calls = (frame(1, 4, 2 * each + 1, block) + frame(0, 1, 2 * each + 1, bytes(5)) for each in range(count))
    settings = frame(4, 0, 0, (4).to_bytes(2) + bytes(4)) + frame(4, 1, 0)  # the initial window, and an acknowledgment
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + b"".join(calls)


async def test_one_address_cannot_hold_all_calls_with_answers_that_it_does_not_take(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_OTHER_CALLS", 7)
    monkeypatch.setattr(interceptors, "MAX_OTHER_CALLS_PER_ADDRESS", 3)
    client = await open_client(max_requests=1)
    reader, writer = await connected(client, ("127.0.0.2", 0))
    writer.write(checks_without_window(7))
    received = b""
    async with asyncio.timeout(30.0):
        while received.count(b"such calls, the most allowed") < 3:
            received += await reader.read(4096)
    assert (await client.complete("hello", max_tokens=1)).text == "a"
    writer.close()


async def test_a_call_whose_answer_is_not_taken_is_ended(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_OTHER_CALLS", 3)
    monkeypatch.setattr(sender, "SEND_S", 0.5)
    client = await open_client(max_requests=1)
    reader, writer = await connected(client)
    writer.write(checks_without_window(5))  # one more than there may be
    received = b""
    async with asyncio.timeout(30.0):
        while b"Concurrent RPC limit exceeded" not in received:
            received += await reader.read(4096)
        while True:
            try:
                answer = await client.complete("hello", max_tokens=1)
                break
            except DiptychError as refused:
                assert refused.code == "RESOURCE_EXHAUSTED"
                await asyncio.sleep(0.05)
    assert answer.text == "a"
    writer.close()


async def test_a_reflection_stream_without_a_message_is_ended(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "MESSAGE_S", 0.2)
    async with grpc.aio.insecure_channel(client.endpoint) as channel:
        stream = silent_call(channel, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
        assert INFERENCE.encode() in await stream.read()
        assert await code_of(stream) == grpc.StatusCode.OK


@pytest.mark.full
async def test_of_a_burst_of_as_many_requests_as_may_run_none_is_refused(open_client: OpenClient) -> None:
    client = await open_client(max_requests=1400)
    answers = await asyncio.gather(*(client.complete("hello", max_tokens=1) for _ in range(1400)))
    assert {answer.text for answer in answers} == {"a"}


async def test_calls_above_the_limit_are_refused(open_client: OpenClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_OTHER_CALLS", 2)
    client = await open_client(max_requests=1)
    async with grpc.aio.insecure_channel(client.endpoint) as channel:
        calls = [silent_call(channel, GENERATE) for _ in range(4)]
        done, waiting = await asyncio.wait([asyncio.create_task(call.code()) for call in calls], timeout=1.0)
        assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED] and len(waiting) == 3
        for call in calls:
            call.cancel()
        await asyncio.wait(waiting)
    assert (await client.complete("hello", max_tokens=1)).text == "a"


@pytest.mark.parametrize("limit", ["MAX_WATCHES", "MAX_WATCHES_PER_ADDRESS"])
async def test_health_watches_are_limited_and_leave_nothing(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(standard_services, limit, 2)
    client = await open_client()
    request = health_pb2.HealthCheckRequest()
    async with grpc.aio.insecure_channel(client.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(request)
        before = len(asyncio.all_tasks())
        for _ in range(3):
            watches = [stub.Watch(request) for _ in range(2)]
            for watch in watches:
                await watch.read()
            assert await code_of(stub.Watch(request)) == grpc.StatusCode.RESOURCE_EXHAUSTED
            for watch in watches:
                watch.cancel()
            await asyncio.sleep(0.2)
        assert len(asyncio.all_tasks()) <= before


async def test_an_endpoint_that_never_answers_is_named() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        endpoint = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with AsyncClient(endpoint) as client:
            with pytest.raises(DiptychError, match=f"{endpoint} did not answer in the time of this call"):
                await client.status(timeout_s=0.3)
