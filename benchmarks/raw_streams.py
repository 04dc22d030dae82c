"""Streams over plain sockets, so that one core can read thousands: an HTTP/1.1 and an HTTP/2 (gRPC) client.

A client only counts what arrives. Of every `PROBE_EVERY`-th stream, a probe, it reads each token's position and keeps
the times. Knows no server but this product's.
"""

import asyncio
import json
import re
import struct
import time
from collections.abc import Callable

from cluster.offline.load.processes import ProcessFailed
from diptych.messages import request_message
from diptych.v1 import inference_pb2

PROBE_EVERY = 8
PROMPT = tuple(range(400, 432))
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
GENERATE = b"/diptych.v1.InferenceService/Generate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
LARGEST_WINDOW = 2**31 - 1
MESSAGE_PREFIX = 5  # bytes: compressed or not, and the length


class RawStream:
    """One answer. `ended` is done at its end, and fails with `ProcessFailed` if it has too few tokens.

    `marks`: of a probe: arrival time of each message, and the tokens so far.
    """

    def __init__(self, index: int, tokens: int) -> None:
        self.tokens = tokens
        self.is_probe = index % PROBE_EVERY == 0
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.marks: list[tuple[float, int]] = []

    def mark(self, at_s: float, count: int) -> None:
        self.marks.append((at_s, count))

    def begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def end(self, failure: str = "") -> None:
        if self.ended.done():
            return
        if self.is_probe and not failure and (count := self.marks[-1][1] if self.marks else 0) != self.tokens:
            failure = f"a stream had {count} tokens instead of {self.tokens}"
        for future in (self.begun, self.ended):
            if failure and not future.done():
                future.set_exception(ProcessFailed(failure))
        self.begin()
        if not failure:
            self.ended.set_result(None)


class HttpStream(asyncio.Protocol):
    """One connection with one streamed completion."""

    def __init__(self, stream: RawStream) -> None:
        self._stream = stream
        self._tail = b""
        self._count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        options = {"continuous_usage_stats": True} if self._stream.is_probe else {}
        body = json.dumps(
            {
                **{"prompt": PROMPT, "max_tokens": self._stream.tokens, "temperature": 0.0, "seed": 0},
                **{"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True} | options},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        if not self._stream.begun.done() and b"data: {" in data:
            self._stream.begin()
        if self._stream.is_probe:
            data = self._tail + data
            found = COMPLETION_TOKENS.findall(data)
            self._tail = data[data.rfind(b"\n") + 1 :]
            if found and (count := int(found[-1])) > self._count:
                self._count = count
                self._stream.mark(time.perf_counter(), count)
        if b"data: [DONE]" in data:
            self._stream.end()
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._stream.end("the server closed a stream before its end")


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection with many calls of `Generate`. Never runs out of its receive window."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[RawStream, bytearray]] = {}
        self._next_id = 1
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        window = struct.pack(">HI", 4, LARGEST_WINDOW)  # SETTINGS_INITIAL_WINDOW_SIZE
        grown = struct.pack(">I", LARGEST_WINDOW - 65_535)
        transport.write(PREFACE + _frame(SETTINGS, 0, 0, window) + _frame(WINDOW_UPDATE, 0, 0, grown))

    def call(self, stream: RawStream) -> None:
        number, self._next_id = self._next_id, self._next_id + 2
        self._streams[number] = stream, bytearray()
        message = request_message(
            PROMPT, max_tokens=stream.tokens, temperature=0.0, seed=0, ignore_eos=True
        ).SerializeToString()
        prefixed = struct.pack(">BI", 0, len(message)) + message
        self._transport.write(
            _frame(HEADERS, END_HEADERS, number, _headers()) + _frame(DATA, END_STREAM, number, prefixed)
        )

    def data_received(self, data: bytes) -> None:
        buffer, at, now_s = self._buffer, 0, time.perf_counter()
        buffer += data
        while len(buffer) - at >= 9:
            length = int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) - at < 9 + length:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            number = int.from_bytes(buffer[at + 5 : at + 9], "big")
            self._on_frame(kind, flags, number, buffer[at + 9 : at + 9 + length], now_s)
            at += 9 + length
        del buffer[:at]

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytearray, now_s: float) -> None:
        if kind == DATA:
            stream, unread = self._streams[number]
            if stream.is_probe:
                unread += payload
                _read_messages(stream, unread, now_s)
            elif not stream.begun.done():
                stream.begin()
        elif kind == HEADERS and flags & END_STREAM:
            self._streams.pop(number)[0].end()
        elif kind == RST_STREAM and number in self._streams:
            self._streams.pop(number)[0].end("the server reset a stream")
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._transport.write(_frame(PING, ACK, 0, bytes(payload)))
        elif kind == GOAWAY:
            self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        for stream, _ in self._streams.values():
            stream.end("the server closed a connection before the end of its streams")

    def close(self) -> None:
        self._streams.clear()
        self._transport.close()


def _read_messages(stream: RawStream, unread: bytearray, now_s: float) -> None:
    """Take the whole messages from `unread`."""
    while len(unread) >= MESSAGE_PREFIX:
        end = MESSAGE_PREFIX + int.from_bytes(unread[1:MESSAGE_PREFIX], "big")
        if len(unread) < end:
            return
        message = inference_pb2.GenerateResponse.FromString(bytes(unread[MESSAGE_PREFIX:end]))
        del unread[:end]
        if tokens := len(message.delta.token_ids):
            stream.begin()
            stream.mark(now_s, message.delta.first_position + tokens)


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def _headers() -> bytes:
    """An HPACK block without a dynamic table: indexes of the static table, and literals that are not to be indexed."""

    def literal(name: bytes, value: bytes) -> bytes:
        return name + bytes((len(value),)) + value

    return b"".join(
        (
            *(
                b"\x83",
                b"\x86",
                literal(b"\x04", GENERATE),
                literal(b"\x01", b"localhost"),
            ),  # POST http :path :authority
            literal(b"\x0f\x10", b"application/grpc"),  # content-type
            literal(b"\x00\x02te", b"trailers"),
        )
    )


async def open_http(url: str) -> tuple[Callable[[RawStream], object], Callable[[], None]]:
    """(start a stream, close). One connection per stream."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task[object]] = set()

    def start(stream: RawStream) -> None:
        task: asyncio.Task[object] = loop.create_task(
            loop.create_connection(lambda: HttpStream(stream), host, int(port))
        )
        opening.add(task)
        task.add_done_callback(opening.discard)

    return start, lambda: None


async def open_grpc(endpoint: str, connections: int = 4) -> tuple[Callable[[RawStream], object], Callable[[], None]]:
    """(start a stream, close). The streams are spread over `connections`."""
    host, _, port = endpoint.rpartition(":")
    loop = asyncio.get_running_loop()
    opened = [(await loop.create_connection(GrpcConnection, host, int(port)))[1] for _ in range(connections)]
    turn = 0

    def start(stream: RawStream) -> None:
        nonlocal turn
        opened[turn % connections].call(stream)
        turn += 1

    def close() -> None:
        for each in opened:
            each.close()

    return start, close
