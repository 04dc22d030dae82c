"""Frames on an asyncio stream.

    kind (1 byte)  length of the body (7 bytes)  number (4 bytes)  body

A frame's length is checked before its body is read. `kvtransfer.rpc.blocking` puts the same frames on a socket.
"""

import asyncio
import enum
import logging
import struct

import msgspec

from kvtransfer.rpc.handshake import HANDSHAKE_BYTES, CallerHandshake

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!QI")
HEADER_BYTES = _HEADER.size  # a longer header costs 20 us in the kernel with a body of 64 KiB
MAX_NUMBER = (1 << 32) - 1
LINGER_S = 1.0


class Kind(enum.IntEnum):
    HANDSHAKE = 1
    CALL = 2
    REPLY = 3  # to the call with this number
    ERROR = 4  # to the call with this number
    MESSAGE = 5  # expects no reply; its number is 0


class ProtocolError(Exception):
    """The peer violated the protocol: disconnect it."""


BROKEN = (OSError, EOFError, msgspec.MsgspecError, ProtocolError)  # a lost connection, or invalid data from the peer


def pack_header(kind: int, number: int, length: int) -> bytes:
    return _HEADER.pack(kind << 56 | length, number)


def parse_header(data: bytes, max_bytes: int) -> tuple[int, int, int]:
    """Kind, number and length of a frame's body. Raises `ProtocolError` for a longer body than `max_bytes`."""
    word, number = _HEADER.unpack(data)
    kind, length = word >> 56, word & (1 << 56) - 1
    if length > max_bytes:
        raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {max_bytes}")
    return kind, number, length


def expect(found: int, kind: Kind) -> None:
    if found != kind:
        raise ProtocolError(f"a frame of kind {found} came instead of {kind.name}")


class FrameStream:
    """Owned by the side that opened or accepted it; `close` it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def peer_host(self) -> str:
        """The peer's address; "" if the connection is closed."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else ""

    async def receive(self, max_bytes: int) -> tuple[int, int, bytes]:
        """Kind, number and body of the next frame. Raises `EOFError`, `OSError` or `ProtocolError`."""
        header = await self._reader.readexactly(HEADER_BYTES)
        kind, number, length = parse_header(header, max_bytes)
        return kind, number, await self._reader.readexactly(length)

    async def receive_handshake(self, max_bytes: int = HANDSHAKE_BYTES) -> bytes:
        kind, _, body = await self.receive(max_bytes)
        expect(kind, Kind.HANDSHAKE)
        return body

    def send(self, kind: Kind, number: int, body: bytes) -> None:
        self._writer.write(pack_header(kind, number, len(body)) + body)

    async def drain(self) -> None:
        await self._writer.drain()

    def abort(self) -> None:
        """Disconnect at once; pending receives raise."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Flush for at most `LINGER_S`, then disconnect."""
        self._writer.close()
        try:
            async with asyncio.timeout(LINGER_S):
                # Shielded: all waiters share the stream's future, and cancelling it would fail the others.
                await asyncio.shield(self._writer.wait_closed())
        except TimeoutError:
            self._writer.transport.abort()
        except OSError as error:
            logger.debug("the connection was broken already: %s", error)


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
