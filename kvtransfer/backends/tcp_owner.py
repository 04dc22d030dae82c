"""The owner's end of a TCP link: serves byte ranges of one registered pool to authenticated readers.

One thread accepts, and one thread serves each connection; the bytes go from the pool to the kernel without a copy and
without the GIL. Invalid data from a reader ends only its own connection. After a failed accept (no file descriptors,
memory or threads) the owner tries again.
"""

import contextlib
import logging
import socket
import struct
import threading
import time

from kvtransfer.errors import PeerLost, TransferError, TransportUnavailable
from kvtransfer.rpc import blocking
from kvtransfer.rpc.frames import BROKEN, HEADER_BYTES, Kind, ProtocolError, expect, parse_header
from kvtransfer.rpc.handshake import HANDSHAKE_S, ListenerHandshake, Unauthenticated, too_many_readers
from kvtransfer.transport import Region

logger = logging.getLogger(__name__)

PROTOCOL = "tcp"
RANGE = struct.Struct("!QQ")  # offset and length in the owner's pool
MAX_RANGES = 1 << 16  # in one call
BACKLOG = 128
STALL_S = 30.0  # a reader that takes nothing for this long is disconnected; it can connect again
ACCEPT_RETRY_MIN_S, ACCEPT_RETRY_MAX_S = 0.05, 1.0


class TcpOwner:
    """Owned by its transport. `close` returns when no thread uses the pool."""

    def __init__(self, region: Region, host: str, secret: bytes, incarnation: str, max_readers: int) -> None:
        self._region = region
        self._secret = secret
        self._incarnation = incarnation
        self._max_readers = max_readers
        self._lock = threading.Lock()
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._unauthenticated: Unauthenticated[socket.socket] = Unauthenticated()
        self._readers: set[socket.socket] = set()
        self._closed = threading.Event()
        self.num_accept_failures = 0
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._server = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.port: int = self._server.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name=f"kv-tcp-accept-{self.port}", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        return len(self._serving)

    def close(self) -> None:
        """Disconnect all readers. Blocks until the threads have ended: call it off the event loop."""
        with self._lock:
            self._closed.set()
            serving = dict(self._serving)
            for link in serving:
                _cut(link)
        _cut(self._server)
        self._accepting.join()
        self._server.close()
        for thread in serving.values():
            thread.join()

    def _accept(self) -> None:
        pause_s = ACCEPT_RETRY_MIN_S
        while not self._closed.is_set():
            try:
                link, address = self._server.accept()
                self._start(link, address[0])
            except (OSError, RuntimeError, MemoryError) as error:
                if self._closed.is_set():
                    return
                self.num_accept_failures += 1
                logger.error(
                    "the transfer port %d cannot accept a reader (failure %d): %s; it tries again in %.2f s",
                    self.port,
                    self.num_accept_failures,
                    error,
                    pause_s,
                )
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, ACCEPT_RETRY_MAX_S)
            else:
                pause_s = ACCEPT_RETRY_MIN_S

    def _start(self, link: socket.socket, address: str) -> None:
        """Serve a connection on a new thread. Raises `RuntimeError` when the process cannot start one."""
        thread = threading.Thread(target=self._serve, args=(link,), name="kv-tcp-serve", daemon=True)
        with self._lock:
            if self._closed.is_set():
                link.close()
                return
            try:
                thread.start()  # takes the lock before it changes these records
            except BaseException:
                link.close()
                raise
            self._serving[link] = thread
            displaced = self._unauthenticated.add(link, address)
            if displaced is not None:
                _cut(displaced)

    def _serve(self, link: socket.socket) -> None:
        try:
            blocking.tune(link)
            handshake = ListenerHandshake(PROTOCOL, self._secret)
            stop_s = time.monotonic() + HANDSHAKE_S
            blocking.greet_caller(link, handshake, lambda target: self._admit(link, target), stop_s)
            while True:
                self._answer(link)
        except (*BROKEN, TransferError) as error:
            logger.debug("a reader's connection ended: %s", error)
        finally:
            with self._lock:
                self._serving.pop(link, None)
                self._unauthenticated.discard(link)
                self._readers.discard(link)
            link.close()

    def _admit(self, link: socket.socket, target: str) -> None:
        """Admit a reader that has proven the secret. Raises the `TransferError` with which it is refused."""
        with self._lock:
            self._unauthenticated.discard(link)
            if target != self._incarnation:
                raise PeerLost("another incarnation answers at this address: ask for its new ticket")
            if len(self._readers) >= self._max_readers:
                raise TransportUnavailable(f"it {too_many_readers(self._max_readers)}")
            self._readers.add(link)

    def _answer(self, link: socket.socket) -> None:
        """Wait for one call, without a time limit, and reply with the bytes of its ranges."""
        number, ranges = _receive_call(link, self._region.pool_bytes)
        pool = self._region.bytes()
        blocking.send_frame(link, Kind.REPLY, number, [pool[offset : offset + length] for offset, length in ranges])


def _receive_call(link: socket.socket, pool_bytes: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Number and ranges of the next call; the rest of a call must arrive within `STALL_S` of its first byte."""
    link.settimeout(None)
    head = blocking.receive_exactly(link, 1)
    stop_s = time.monotonic() + STALL_S
    head += blocking.receive_exactly(link, HEADER_BYTES - 1, stop_s)
    kind, number, length = parse_header(head, MAX_RANGES * RANGE.size)
    expect(kind, Kind.CALL)
    if not length or length % RANGE.size:
        raise ProtocolError(f"{length} bytes are no list of ranges")
    ranges = tuple(RANGE.iter_unpack(blocking.receive_exactly(link, length, stop_s)))
    link.settimeout(STALL_S)
    if any(length == 0 or offset + length > pool_bytes for offset, length in ranges):
        raise ProtocolError("a range lies outside the pool")
    return number, ranges


def _cut(link: socket.socket) -> None:
    """Wake every thread that blocks on this socket."""
    with contextlib.suppress(OSError):  # not connected, or cut already: then no thread blocks on it
        link.shutdown(socket.SHUT_RDWR)
