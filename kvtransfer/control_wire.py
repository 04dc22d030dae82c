"""The frames of the lease protocol, and the channel that carries them.

    owner  -> reader   Hello(version, nonce)
    reader -> owner    Prove(version, nonce, proof, incarnation it expects or None)
    owner  -> reader   Welcome(proof, peer)   or   Refused(reason)
    reader -> owner    Watch | Release                                         } many at once,
    owner  -> reader   Answer | Released | Failed, with the request's number   } in any order

Every frame is typed msgpack behind its length, and bounded before it is read. Knows no lease and no server.
"""

import asyncio
import logging

import msgspec

from kvtransfer.ticket import PeerAddress, Piece, Progress

logger = logging.getLogger(__name__)

VERSION = 3
FRAME_BYTES = 16 << 20  # see `digest.MAX_DIGESTS`
STRANGER_BYTES = 4096  # before the handshake
LINGER_S = 1.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    version: int
    nonce: bytes


class Prove(msgspec.Struct, frozen=True, tag=True):
    version: int
    nonce: bytes
    proof: bytes
    incarnation: str | None


class Welcome(msgspec.Struct, frozen=True, tag=True):
    proof: bytes
    peer: PeerAddress


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str
    lost: bool = False  # another incarnation than the one asked for
    full: bool = False  # as many readers are connected as may be


class Watch(msgspec.Struct, frozen=True, tag=True):
    number: int
    lease: str
    epoch: int
    have_blocks: int
    timeout_s: float
    pieces: tuple[Piece, ...]  # of which the reader wants digests


class Release(msgspec.Struct, frozen=True, tag=True):
    number: int
    lease: str
    epoch: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    progress: Progress


class Released(msgspec.Struct, frozen=True, tag=True):
    number: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    number: int
    reason: str
    lease_lost: bool


Request = Watch | Release
Reply = Answer | Released | Failed


class Channel:
    """Length-prefixed msgpack frames over one asyncio connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def peer_host(self) -> str:
        """Where the connection comes from; "" if it is gone already."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else ""

    async def receive(self, limit_bytes: int) -> bytes:
        num_bytes = int.from_bytes(await self._reader.readexactly(4), "big")
        if num_bytes > limit_bytes:
            raise ConnectionError(f"a frame of {num_bytes} bytes exceeds the limit of {limit_bytes}")
        return await self._reader.readexactly(num_bytes)

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)

    async def drain(self) -> None:
        await self._writer.drain()

    def abort(self) -> None:
        """Hang up at once; whoever receives here gets an error."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is written, for a moment, then hang up whatever the peer does."""
        self._writer.close()
        try:
            async with asyncio.timeout(LINGER_S):
                # Shielded: the stream has one future for all who wait, and a cancelled one would fail the others.
                await asyncio.shield(self._writer.wait_closed())
        except TimeoutError:
            self._writer.transport.abort()
        except OSError as error:
            logger.debug("the connection was broken already: %s", error)


BROKEN = (OSError, EOFError, msgspec.MsgspecError)  # a link that is cut, or a peer that talks nonsense
