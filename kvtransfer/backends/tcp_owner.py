"""The owner's end of a TCP link: serves byte ranges of one registered pool to authenticated readers.

One thread accepts and serves all connections; the bytes go from the pool to the kernel without a copy and without the
GIL. Invalid data from a reader ends only its own connection. After a failed accept (no file descriptors or memory) the
owner tries again.
"""

import logging
import socket
import struct
import time
from functools import partial

from kvtransfer.errors import PeerLost, TransferError, TransportUnavailable
from kvtransfer.rpc import polled
from kvtransfer.rpc.frames import BROKEN, HEADER_BYTES, Kind, ProtocolError, expect, parse_header
from kvtransfer.rpc.handshake import HANDSHAKE_S, ListenerHandshake, Unauthenticated, too_many_readers
from kvtransfer.rpc.poller import AGAIN, IDLE, Poller, Steps, pause
from kvtransfer.transport import Region

logger = logging.getLogger(__name__)

PROTOCOL = "tcp"
RANGE = struct.Struct("!QQ")  # offset and length in the owner's pool
MAX_RANGES = 1 << 11  # in one call: its ranges are parsed in one step
BACKLOG = 128
STALL_S = 30.0  # a reader that takes nothing for this long is disconnected; it can connect again
ACCEPT_RETRY_MIN_S, ACCEPT_RETRY_MAX_S = 0.05, 1.0


class TcpOwner:
    """Owned by its transport. `close` returns when no thread uses the pool. All else runs on the poller's thread."""

    def __init__(self, region: Region, host: str, secret: bytes, incarnation: str, max_readers: int) -> None:
        self._region = region
        self._secret = secret
        self._incarnation = incarnation
        self._max_readers = max_readers
        self._serving: set[socket.socket] = set()
        self._unauthenticated: Unauthenticated[socket.socket] = Unauthenticated()
        self._readers: set[socket.socket] = set()
        self.num_accept_failures = 0
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._server = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._poller = Poller(f"kv-tcp-serve-{self.port}")
        self._poller.call(self._listen)

    @property
    def num_connections(self) -> int:
        return len(self._serving)

    def close(self, limit_s: float) -> None:
        """Disconnect all readers. Blocks until the thread has ended: call it off the event loop.

        Raises `TransferTimeout`."""
        self._poller.close(limit_s)

    def _listen(self) -> None:
        self._poller.watch(self._server)
        self._poller.start(self._server, self._accept(), lambda _: self._server.close())

    def _accept(self) -> Steps[None]:
        pause_s = ACCEPT_RETRY_MIN_S
        while True:
            try:
                link, address = self._server.accept()
                self._start(link, address[0])
            except BlockingIOError:
                yield IDLE
            except (OSError, MemoryError) as error:
                self.num_accept_failures += 1
                logger.error(
                    "the transfer port %d cannot accept a reader (failure %d): %s; it tries again in %.2f s",
                    self.port,
                    self.num_accept_failures,
                    error,
                    pause_s,
                )
                yield from pause(pause_s)
                pause_s = min(2 * pause_s, ACCEPT_RETRY_MAX_S)
            else:
                pause_s = ACCEPT_RETRY_MIN_S
                yield AGAIN

    def _start(self, link: socket.socket, address: str) -> None:
        self._poller.watch(link)
        self._serving.add(link)
        displaced = self._unauthenticated.add(link, address)
        if displaced is not None:
            self._poller.stop(displaced, ConnectionError("too many connections have not proven the secret"))
        self._poller.start(link, self._serve(link), partial(self._ended, link))

    def _serve(self, link: socket.socket) -> Steps[None]:
        polled.tune(link)
        handshake = ListenerHandshake(PROTOCOL, self._secret)
        stop_s = time.monotonic() + HANDSHAKE_S
        yield from polled.greet_caller(link, handshake, lambda target: self._admit(link, target), stop_s)
        while True:
            yield from self._answer(link)

    def _ended(self, link: socket.socket, error: Exception | None) -> None:
        is_expected = isinstance(error, (*BROKEN, TransferError))
        logger.log(
            logging.DEBUG if is_expected else logging.ERROR, "a reader's connection ended: %s", error, exc_info=error
        )
        self._serving.discard(link)
        self._unauthenticated.discard(link)
        self._readers.discard(link)
        link.close()

    def _admit(self, link: socket.socket, target: str) -> None:
        """Admit a reader that has proven the secret. Raises the `TransferError` with which it is refused."""
        self._unauthenticated.discard(link)
        if target != self._incarnation:
            raise PeerLost("another incarnation answers at this address: ask for its new ticket")
        if len(self._readers) >= self._max_readers:
            raise TransportUnavailable(f"it {too_many_readers(self._max_readers)}")
        self._readers.add(link)

    def _answer(self, link: socket.socket) -> Steps[None]:
        """Wait for one call, without a time limit, and reply with the bytes of its ranges."""
        number, ranges = yield from _receive_call(link, self._region.pool_bytes)
        views = polled.views_of(self._region.bytes(), ranges)
        num_bytes = sum(length for _, length in ranges)
        yield from polled.send_frame(link, Kind.REPLY, number, num_bytes, views, STALL_S)


def _receive_call(link: socket.socket, pool_bytes: int) -> Steps[tuple[int, tuple[tuple[int, int], ...]]]:
    """Number and ranges of the next call; the rest of a call must arrive within `STALL_S` of its first byte."""
    head = yield from polled.receive_exactly(link, 1, IDLE)
    stop_s = time.monotonic() + STALL_S
    head += yield from polled.receive_exactly(link, HEADER_BYTES - 1, stop_s)
    kind, number, length = parse_header(head, MAX_RANGES * RANGE.size)
    expect(kind, Kind.CALL)
    if not length or length % RANGE.size:
        raise ProtocolError(f"{length} bytes are no list of ranges")
    ranges = tuple(RANGE.iter_unpack((yield from polled.receive_exactly(link, length, stop_s))))
    if any(size == 0 or offset + size > pool_bytes for offset, size in ranges):
        raise ProtocolError("a range is outside the pool")
    return number, ranges
