"""A stream of frames that outlives its connections: after a reconnect, no frame is lost and none arrives twice.

Each end counts the frames that it received and acknowledges them after every few frames or bytes (ACK), not by a timer.
Frames without an acknowledgment are kept, and sent again on the next connection, from the first one that the other end
has not received.

    caller    opens the first connection, and the next one when it breaks, for at most `resume_s`
    listener  waits for the caller for at most `resume_s`, then the session has ended

The handshake of each connection carries `SessionTarget`, the welcome the listener's count. Used as a `FrameStream`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from diptych.watchdog import Watchdog, patient_timeout
from kvtransfer.errors import PeerLost, TransferError
from kvtransfer.rpc.frames import FrameStream, Kind, ProtocolError

logger = logging.getLogger(__name__)

WINDOW = 8  # frames without an acknowledgment; then `drain` waits, so that a slow peer gets fewer and larger ones
ACK_FRAMES, ACK_BYTES = 4, 64 << 10  # an acknowledgment is sent after the first of these
RECONNECT_S = 0.05  # between attempts to connect again


class SessionTarget(msgspec.Struct, frozen=True):
    """What a caller asks for: an incarnation, and a new session or the rest of one.

    `connection`: the caller's number of this connection; 0 begins the session. `received`: the frames that it received.
    """

    incarnation: str
    session: str
    connection: int = 0
    received: int = 0

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "SessionTarget":
        """Raises `PeerLost`."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"{text!r} names no session: {error}") from None


# Number of the connection, own count -> the connection, and the listener's count.
Reopen = Callable[[int, int], Awaitable[tuple[FrameStream, int]]]


class SessionStream:
    """One end of a session; `close` it. `ended` has the error with which it ended, for good.

    `reopen` (of a caller) opens the next connection. `resume_s` bounds the time without a connection.
    """

    def __init__(self, stream: FrameStream, resume_s: float, reopen: Reopen | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Exception] = loop.create_future()
        self.received = 0  # frames, of the whole session
        self._connection = 0  # the number of the latest
        self._resume_s = resume_s
        self._reopen = reopen
        self._stream: FrameStream | None = None  # while connected
        self._peer_host = stream.peer_host
        self._first = stream
        self._kept: deque[tuple[Kind, int, bytes]] = deque()  # not acknowledged
        self._acknowledged = 0  # frames that the peer has received
        self._unacknowledged = self._unacknowledged_bytes = 0  # frames received since our last ACK
        self._room: asyncio.Future[None] | None = None  # while `drain` waits
        self._on_frame: Callable[[int, int, bytes], None] | None = None
        self._max_bytes = 0
        self._is_paused = False
        self._resuming: asyncio.Task[None] | None = None
        self._patience: Watchdog | None = None  # while a listener waits for its caller
        self._loop = loop

    @property
    def peer_host(self) -> str:
        return self._peer_host

    def deliver(self, on_frame: Callable[[int, int, bytes], None], max_bytes: int) -> None:
        """As `FrameStream.deliver`: the session begins."""
        self._on_frame, self._max_bytes = on_frame, max_bytes
        self.attach(self._first, 0)

    def attach(self, stream: FrameStream, peer_received: int) -> None:
        """Go on with this connection, whose other end has received `peer_received` frames."""
        if self.ended.done():  # meanwhile
            stream.send(Kind.END, 0, b"")
            return stream.abort()
        self._stream = stream
        if self._patience is not None:
            self._patience.close()
            self._patience = None
        try:
            self._acknowledge(peer_received)
        except ProtocolError as error:
            self._end(error)
            return stream.abort()
        for frame in self._kept:
            stream.send(*frame)
        stream.ended.add_done_callback(lambda ended: self._disconnected(stream, ended.result()))
        stream.deliver(self._take, self._max_bytes)
        if self._is_paused:
            stream.pause()

    def detach(self, connection: int) -> int:
        """Drop the connection, if there still is one, for this newer one; returns how many frames have arrived.

        Raises `PeerLost` for an older one, which was delayed.
        """
        if connection <= self._connection:
            raise PeerLost(f"connection {connection} comes after connection {self._connection}")
        self._connection = connection
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.pause()
            stream.abort()
        return self.received

    def send(self, kind: Kind, number: int, body: bytes) -> None:
        if self.ended.done():
            return
        self._kept.append((kind, number, body))
        if self._stream is not None:
            self._stream.send(kind, number, body)

    async def drain(self) -> None:
        """Wait until the peer has received most of what was sent, or the session has ended."""
        while not self._has_room():
            self._room = self._room or self._loop.create_future()
            await asyncio.shield(self._room)

    def pause(self) -> None:
        self._is_paused = True
        if self._stream is not None:
            self._stream.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._stream is not None:
            self._stream.resume()

    def abort(self) -> None:
        """End the session at once."""
        self._end_here()
        if self._stream is not None:
            self._stream.abort()

    async def close(self) -> None:
        """Flush what the connection takes, and end the session."""
        self._end_here()
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)
        if self._stream is not None:
            await self._stream.close()

    # ---- frames ------------------------------------------------------------------------------------------------

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == Kind.ACK:
            return self._acknowledge(number)
        if kind == Kind.END:
            self._end(EOFError("the peer ended the session"))
            return self.abort()
        assert self._on_frame is not None
        self.received += 1
        self._unacknowledged += 1
        self._unacknowledged_bytes += len(body)
        if self._unacknowledged >= ACK_FRAMES or self._unacknowledged_bytes >= ACK_BYTES:
            self._send_ack()
        self._on_frame(kind, number, body)

    def _send_ack(self) -> None:
        self._unacknowledged = self._unacknowledged_bytes = 0
        if self._stream is not None:
            self._stream.send(Kind.ACK, self.received & 0xFFFFFFFF, b"")

    def _acknowledge(self, count: int) -> None:
        """The peer has received `count` frames, modulo 2**32."""
        news = (count - self._acknowledged) & 0xFFFFFFFF
        if news > len(self._kept):
            raise ProtocolError(f"it got {count} frames, of {self._acknowledged + len(self._kept)} that were sent")
        for _ in range(news):
            self._kept.popleft()
        self._acknowledged += news
        if self._room is not None and self._has_room():
            self._let_go()

    def _has_room(self) -> bool:
        return self.ended.done() or (self._stream is not None and len(self._kept) < WINDOW)

    def _let_go(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # ---- connections -------------------------------------------------------------------------------------------

    def _disconnected(self, stream: FrameStream, error: Exception) -> None:
        if stream is not self._stream or self.ended.done():
            return  # it was replaced, or the session has ended
        self._stream = None
        if not isinstance(error, EOFError | OSError):
            self._end(error)  # the peer broke the protocol
        elif self._reopen is None:
            self._patience = Watchdog(self._resume_s, lambda: self._end(error))
        else:
            self._resuming = asyncio.ensure_future(self._resume(self._reopen, error))

    async def _resume(self, reopen: Reopen, error: Exception) -> None:
        """Connect again; `error` ended the last connection, and ends the session if there is no next one."""
        try:
            async with patient_timeout(self._resume_s):
                while True:
                    self._connection += 1
                    try:
                        stream, peer_received = await reopen(self._connection, self.received)
                        break
                    except ConnectionRefusedError:
                        return self._end(error)  # its process has ended
                    except (OSError, EOFError) as failure:
                        logger.info("the connection broke (%s), and could not be opened again: %s", error, failure)
                        await asyncio.sleep(RECONNECT_S)
            self.attach(stream, peer_received)
        except (TimeoutError, TransferError) as failure:
            logger.info("the session has ended: %s", failure)
            self._end(error)

    def _end_here(self) -> None:
        """The peer need not wait for another connection."""
        if self._stream is not None and not self.ended.done():
            self._stream.send(Kind.END, 0, b"")
        self._end(EOFError("this end closed the connection"))

    def _end(self, error: Exception) -> None:
        if self.ended.done():
            return
        self.ended.set_result(error)
        self._kept.clear()
        self._let_go()
        if self._patience is not None:
            self._patience.close()
