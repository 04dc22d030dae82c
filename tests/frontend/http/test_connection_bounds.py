"""No client keeps others out with connections, headers or bodies that never end; what is refused is refused clearly."""

import asyncio
import gc
import gzip
import json
import resource
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.frontend import connection_limits
from cluster.frontend.http import connection, listener, server
from cluster.frontend.http.server import HttpServer
from cluster.frontend.servers import Servers
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.guarded import Files, guarded
from tests.frontend.http.hostile import MAX_S, longest_callback
from tests.frontend.http.opened import Clients, opened
from tests.kvtransfer.peers import no_descriptors_left

ASK = {"prompt": "hello", "max_tokens": 4}
BODY = json.dumps(ASK).encode()
STRANGER = "127.0.0.2"
ASYNCIO_READ_BYTES = 256 << 10
Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def head(length: int, *more: str) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "host: h", "content-type: application/json", f"content-length: {length}")
    return "\r\n".join((*lines, *more, "\r\n")).encode()


def http_server_of(servers: Servers) -> HttpServer:
    assert servers._http is not None
    return servers._http


def connected(http_server: HttpServer) -> int:
    return len(http_server._server.server_state.connections)


@asynccontextmanager
async def raw(url: str, sent: bytes = b"", host: str = STRANGER) -> AsyncIterator[Connected]:
    port = int(url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    try:
        writer.write(sent)
        yield reader, writer
    finally:
        writer.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All until the server closes the connection, which it must."""
    got = b""
    async with asyncio.timeout(10):
        try:
            while piece := await reader.read(1 << 16):
                got += piece
        except ConnectionError:
            pass
    return got


async def head_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        return await reader.readuntil(b"\r\n\r\n")


async def test_incomplete_bodies_do_not_count_as_requests(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher) as (there, servers):
        http_server, url = http_server_of(servers), servers.http_url
        http_server._requests._max_requests = 1
        async with raw(url, head(10) + b"{"), raw(url, head(10) + b"{"):
            await until(lambda: connected(http_server) == 2)
            assert (await there.http.post("/v1/completions", json=ASK)).status_code == 200


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"], ids=["new", "after a request"])
async def test_headers_that_never_end_are_aborted(
    there: Clients, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.2)
    async with raw(str(there.http.base_url).rstrip("/"), before) as (reader, writer):
        if before:
            await head_of(reader)
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        ended = asyncio.create_task(rest(reader))
        async with asyncio.timeout(10):
            while not ended.done():
                writer.write(b"a")
                await asyncio.sleep(0.01)


async def test_a_connection_that_sends_nothing_is_closed(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.1)
    async with raw(str(there.http.base_url).rstrip("/")) as (reader, _):
        assert await rest(reader) == b""


async def test_an_idle_connection_is_closed_after_its_last_answer(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)
    asked = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
    async with opened(dispatcher) as (_, servers), raw(servers.http_url, asked) as (reader, _):
        assert (await rest(reader)).startswith(b"HTTP/1.1 200")


async def test_the_header_timeout_cancels_no_running_request(
    there: Clients, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.1)
    dispatcher.step_s = 0.1
    answer = await there.http.post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)


async def test_a_refused_body_is_read_for_a_bounded_time(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.2)
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", 10)
    async with raw(str(there.http.base_url).rstrip("/"), head(1 << 30)) as (reader, writer):
        assert b" 413 " in await head_of(reader)
        ended = asyncio.create_task(rest(reader))
        async with asyncio.timeout(10):
            while not ended.done():
                writer.write(b" " * 100)
                await asyncio.sleep(0.01)


async def test_a_connection_continues_after_a_refused_body(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", len(BODY))
    async with raw(str(there.http.base_url).rstrip("/"), head(100_000)) as (reader, writer):
        assert b" 413 " in await head_of(reader)
        writer.write(b" " * 100_000 + head(len(BODY), "connection: close") + BODY)
        assert b"HTTP/1.1 200" in await rest(reader)


async def test_connections_are_limited_per_address(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    async with opened(dispatcher) as (there, servers):
        url, whole = servers.http_url, head(len(BODY), "connection: close") + BODY
        async with raw(url):
            async with raw(url), raw(url, whole) as (reader, _):
                assert await rest(reader) == b""
                assert (await there.http.get("/health")).status_code == 200
            await until(lambda: connected(http_server_of(servers)) == 2)  # the client of this test has one
            async with raw(url, whole) as (reader, _):
                assert b"HTTP/1.1 200" in await rest(reader)
    assert f"refused a connection of {STRANGER}, which has 2 of" in caplog.text


@pytest.mark.parametrize(("most", "open_files"), [(8, 1 << 20), (4096, 16)], ids=["constant", "open files"])
def test_connections_are_limited_in_all(monkeypatch: pytest.MonkeyPatch, most: int, open_files: int) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", most)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (open_files, open_files))
    opened = listener.listen("127.0.0.1", 0)
    opened.setblocking(True)
    clients = [socket.create_connection(opened.getsockname(), 10, (f"127.0.0.{n // 2 + 2}", 0)) for n in range(9)]
    accepted = [opened.accept()[0] for _ in range(8)]
    opened.setblocking(False)
    with pytest.raises(BlockingIOError):
        opened.accept()
    assert opened.num_open == 8 and clients[8].recv(1) == b"", "the ninth was closed"
    for each in (*clients, *accepted, opened):
        each.close()
    assert opened.num_open == 0


async def test_without_descriptors_it_says_so_once_a_second_and_then_accepts_again() -> None:
    loop, errors = asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: errors.append(str(context)))
    async with opened(FakeDispatcher()) as (_, servers):
        port = int(servers.http_url.rsplit(":", 1)[1])
        with socket.socket() as waiting:
            waiting.setblocking(False)
            with no_descriptors_left():
                await loop.sock_connect(waiting, ("127.0.0.1", port))
                await until(lambda: bool(errors))
                await asyncio.sleep(0.2)
            assert len(errors) == 1 and "out of system resource" in errors[0]
            await loop.sock_sendall(waiting, head(len(BODY)) + BODY)
            async with asyncio.timeout(30.0):
                assert (await loop.sock_recv(waiting, 100)).startswith(b"HTTP/1.1 200")


async def test_an_unfinished_tls_handshake_counts_as_a_connection(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_ADDRESS", 1)
    async with (
        guarded(dispatcher, **Files.made(tmp_path).tls) as http_server,
        raw(http_server.url),
        raw(http_server.url) as (reader, _),
    ):
        assert await rest(reader) == b""


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_two_body_lengths_are_refused_and_the_rest_is_not_read(
    there: Clients, dispatcher: FakeDispatcher, method: str
) -> None:
    first = head(4, "transfer-encoding: chunked").replace(b"POST", method.encode())
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    async with raw(str(there.http.base_url).rstrip("/"), first + chunked + head(len(BODY)) + BODY) as (reader, _):
        got = await rest(reader)
    assert got.startswith(b"HTTP/1.1 400") and b"\r\nconnection: close\r\n" in got and b"send one of them" in got
    assert got.count(b"HTTP/1.1 ") == 1 and not dispatcher.requests


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity, br", 415), ("Identity", 200)])
async def test_compressed_bodies_are_refused_by_name(there: Clients, encoding: str, status: int) -> None:
    content = gzip.compress(BODY) if status == 415 else BODY
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    answer = await there.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["error"]["code"] == "unsupported_encoding"
        assert "send the body uncompressed" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("bound", "crowded"),
    [("MAX_UNREAD_BYTES_PER_ADDRESS", {STRANGER: True, "127.0.0.3": False}), ("MAX_UNREAD_BYTES", {"127.0.0.3": True})],
)
async def test_incomplete_bodies_have_a_memory_limit(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch, bound: str, crowded: dict[str, bool]
) -> None:
    monkeypatch.setattr(connection, "FREE_BYTES", len(BODY))
    monkeypatch.setattr(connection, bound, 1000)
    async with opened(dispatcher) as (_, servers):
        url, unread = servers.http_url, http_server_of(servers)._requests._bodies._unread
        async with raw(url, head(9000) + b" " * 900):
            await until(lambda: unread.total() > 0)
            for host, is_refused in crowded.items():
                async with raw(url, head(600 + len(BODY)) + b" " * 500, host) as (reader, writer):
                    if not is_refused:
                        await until(lambda: len(unread) == 2)
                        writer.write(b" " * 100 + BODY)
                    assert (b" 429 " if is_refused else b" 200 ") in await head_of(reader)
                async with raw(url, head(len(BODY)) + BODY, host) as (reader, _):
                    assert b" 200 " in await head_of(reader), "a small body always passes"
        await until(lambda: not unread)


async def test_a_body_of_tiny_chunks_is_parsed_in_parts(dispatcher: FakeDispatcher) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.ljust(ASYNCIO_READ_BYTES // 6))
    begin = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    async with opened(dispatcher) as (_, servers):
        http_server = http_server_of(servers)
        async with raw(servers.http_url) as (reader, _):
            await until(lambda: connected(http_server) == 1)
            (protocol,) = http_server._server.server_state.connections
            with longest_callback() as longest:
                asyncio.get_running_loop().call_soon(protocol.data_received, begin + chunks + b"0\r\n\r\n")
                assert b" 200 " in await reader.readline()
    assert longest.seconds < MAX_S, longest


async def test_a_large_body_is_freed_before_the_answer(dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    size = 4 << 20
    async with opened(dispatcher) as (there, servers):
        assert (await there.http.post("/tokenize", json={"prompt": "a" * 3000})).status_code == 200  # all is loaded
        async with raw(servers.http_url, head(size + len(BODY))) as (_, writer):
            tracemalloc.start()
            try:
                for _ in range(size >> 16):
                    writer.write(b" " * (1 << 16))
                    await writer.drain()
                writer.write(BODY)
                await until(lambda: bool(dispatcher.running))
                gc.collect()
                assert tracemalloc.get_traced_memory()[0] < size // 2
            finally:
                tracemalloc.stop()


async def test_a_client_that_reads_no_probe_responses_is_disconnected(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.1)
    async with opened(dispatcher) as (_, servers), raw(servers.http_url) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            await until(lambda: connected(http_server_of(servers)) == 1)
            while connected(http_server_of(servers)):
                writer.write(b"GET /metrics HTTP/1.1\r\nhost: h\r\n\r\n" * 10)
                await asyncio.sleep(0.01)
