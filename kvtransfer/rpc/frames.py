"""Frames on an asyncio transport.

    kind (1 byte)  length of the body (7 bytes)  number (4 bytes)  body

A frame's length is checked before its body is read. `kvtransfer.rpc.polled` puts the same frames on a socket.
"""

import asyncio
import enum
import struct
from collections.abc import Callable
from typing import cast

import msgspec

from kvtransfer.rpc.handshake import HANDSHAKE_BYTES, CallerHandshake

_HEADER = struct.Struct("!QI")
HEADER_BYTES = _HEADER.size  # a longer header costs 20 us in the kernel with a body of 64 KiB
MAX_NUMBER = (1 << 32) - 1
LINGER_S = 1.0
READ_BYTES = 64 << 10  # asyncio allocates 256 KiB for each read, which takes 30 us


class Kind(enum.IntEnum):
    HANDSHAKE = 1
    CALL = 2
    REPLY = 3  # to the call with this number
    ERROR = 4  # to the call with this number
    MESSAGE = 5  # expects no reply; its number is 0
    ACK = 6  # its number is that of the frames received in this session; see `kvtransfer.rpc.session`
    END = 7  # of a session; its number is 0


class ProtocolError(Exception):
    """The peer violated the protocol: disconnect it."""


BROKEN = (OSError, EOFError, msgspec.MsgspecError, ProtocolError)  # a lost connection, or invalid data from the peer


def pack_header(kind: int, number: int, length: int) -> bytes:
    return _HEADER.pack(kind << 56 | length, number)


def parse_header(data: bytes | bytearray, max_bytes: int) -> tuple[int, int, int]:
    """Kind, number and length of a frame's body. Raises `ProtocolError` for a longer body than `max_bytes`."""
    word, number = _HEADER.unpack_from(data)
    kind, length = word >> 56, word & (1 << 56) - 1
    if length > max_bytes:
        raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {max_bytes}")
    return kind, number, length


def expect(found: int, kind: Kind) -> None:
    if found != kind:
        raise ProtocolError(f"a frame of kind {found} came instead of {kind.name}")


class FrameStream(asyncio.Protocol):
    """One end of a connection; `close` it. Frames are received one by one, or pushed as they arrive after `deliver`.

    `ended` has the error with which the connection ended. Owned by the side that opened or accepted it.
    """

    def __init__(self, accepted: "Callable[[FrameStream], None] | None" = None) -> None:
        self.ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._accepted = accepted
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._arrived: asyncio.Future[None] | None = None  # while `receive` waits
        self._writable: asyncio.Future[None] | None = None  # while the kernel takes no more
        self._on_frame: Callable[[int, int, bytes], None] | None = None
        self._max_bytes = 0
        self._is_paused = False

    @classmethod
    async def connect(cls, host: str, port: int) -> "FrameStream":
        """Raises OSError."""
        _, stream = await asyncio.get_running_loop().create_connection(cls, host, port)
        return stream

    @classmethod
    async def connect_on_host(cls, name: str) -> "FrameStream":
        """Connect to a process of this host by a name in Linux's abstract namespace of Unix sockets. Raises OSError."""
        _, stream = await asyncio.get_running_loop().create_unix_connection(cls, f"\0{name}")
        return stream

    @property
    def peer_host(self) -> str:
        """The peer's address; "" if the connection is closed or has none."""
        name = self._wire.get_extra_info("peername")
        return str(name[0]) if name else ""

    @property
    def _wire(self) -> asyncio.Transport:
        assert self._transport is not None, "asyncio connects a protocol before it is used"
        return self._transport

    async def receive(self, max_bytes: int) -> tuple[int, int, bytes]:
        """Kind, number and body of the next frame. Raises `EOFError`, `OSError` or `ProtocolError`."""
        while (frame := self._next_frame(max_bytes)) is None:
            if self.ended.done():
                raise self.ended.result()
            self._wire.resume_reading()
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return frame

    async def receive_handshake(self, max_bytes: int = HANDSHAKE_BYTES) -> bytes:
        kind, _, body = await self.receive(max_bytes)
        expect(kind, Kind.HANDSHAKE)
        return body

    def deliver(self, on_frame: Callable[[int, int, bytes], None], max_bytes: int) -> None:
        """Call `on_frame` for every frame from now on. An error of it, or of a frame, ends the connection."""
        self._on_frame, self._max_bytes = on_frame, max_bytes
        self.resume()

    def pause(self) -> None:
        """Deliver no frames, and read no bytes, until `resume`."""
        self._is_paused = True
        self._wire.pause_reading()

    def resume(self) -> None:
        self._is_paused = False
        self._wire.resume_reading()
        self._deliver()

    def send(self, kind: Kind, number: int, body: bytes) -> None:
        if not self._wire.is_closing():
            self._wire.write(pack_header(kind, number, len(body)) + body)

    async def drain(self) -> None:
        """Wait until the kernel has taken most of what was sent, or the connection has ended."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def abort(self) -> None:
        """Disconnect at once; pending receives raise."""
        self._wire.abort()

    async def close(self) -> None:
        """Flush for at most `LINGER_S`, then disconnect."""
        self._wire.close()
        await asyncio.wait([self.ended], timeout=LINGER_S)
        self._wire.abort()

    # ---- called by asyncio -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if hasattr(transport, "max_size"):  # of asyncio's own transports; uvloop reads as much at once
            transport.max_size = READ_BYTES
        if self._accepted is not None:
            self._accepted(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._on_frame is not None:
            self._deliver()
            return
        if len(self._buffer) > HANDSHAKE_BYTES:
            self._wire.pause_reading()
        _wake(self._arrived)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or EOFError("the peer disconnected"))

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        _wake(self._writable)
        self._writable = None

    # ---- internals -------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            while not self._is_paused and (frame := self._next_frame(self._max_bytes)) is not None:
                assert self._on_frame is not None
                self._on_frame(*frame)
        except Exception as error:
            self._end(error)
            self.abort()

    def _next_frame(self, max_bytes: int) -> tuple[int, int, bytes] | None:
        """The next frame, removed from the buffer; None if it has not arrived whole. Raises `ProtocolError`."""
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES:
            return None
        kind, number, length = parse_header(buffer, max_bytes)
        end = HEADER_BYTES + length
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[HEADER_BYTES:end])
        del buffer[:end]
        return kind, number, body

    def _end(self, error: Exception) -> None:
        self._is_paused = True
        if not self.ended.done():
            self.ended.set_result(error)
        _wake(self._arrived)
        self.resume_writing()


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


async def greet(stream: FrameStream, handshake: CallerHandshake, max_verdict_bytes: int = HANDSHAKE_BYTES) -> bytes:
    """The caller's half of the handshake; returns the body of the welcome.

    Raises `CallerHandshake`'s errors, `OSError` or `EOFError`.
    """
    try:
        claim = handshake.claim(await stream.receive_handshake())
        stream.send(Kind.HANDSHAKE, 0, claim)
        return handshake.accept(await stream.receive_handshake(max_verdict_bytes))
    except ProtocolError as error:
        raise handshake.wrong_protocol(str(error)) from error
