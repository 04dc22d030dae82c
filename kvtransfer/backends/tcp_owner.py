"""The owner's end of our TCP link: serves byte ranges of one registered pool to authenticated readers.

One thread accepts, one thread serves each connection; the bytes go from the pool to the kernel without a copy and
without the GIL. Whatever a reader sends, the worst it can reach is its own connection. Whatever stops an accept (no
file descriptors, no memory, no threads) stops it only as long as it lasts.
"""

import contextlib
import logging
import socket
import struct
import threading
import time

from kvtransfer.backends import tcp_wire
from kvtransfer.transport import Region
from kvtransfer.unauthenticated import Unauthenticated, too_many_readers

logger = logging.getLogger(__name__)

BACKLOG = 128
HANDSHAKE_S = 5.0
STALL_S = 30.0  # a reader that takes nothing for so long is cut off; it can connect again
ACCEPT_RETRY_MIN_S, ACCEPT_RETRY_MAX_S = 0.05, 1.0


class TcpOwner:
    """Owned by its transport. `close` returns when no thread touches the pool any more."""

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
        self._door = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.port: int = self._door.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name=f"kv-tcp-door-{self.port}", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        return len(self._serving)

    def close(self) -> None:
        """Hang up on everybody. Blocks until the threads have ended: call it off the event loop."""
        with self._lock:
            self._closed.set()
            serving = dict(self._serving)
            for link in serving:
                _cut(link)
        _cut(self._door)
        self._accepting.join()
        self._door.close()
        for thread in serving.values():
            thread.join()

    def _accept(self) -> None:
        pause_s = ACCEPT_RETRY_MIN_S
        while not self._closed.is_set():
            try:
                link, address = self._door.accept()
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
        """Serve a connection on a thread of its own. Raises `RuntimeError` when the process can have no more."""
        thread = threading.Thread(target=self._serve, args=(link,), name="kv-tcp-serve", daemon=True)
        with self._lock:
            if self._closed.is_set():
                link.close()
                return
            try:
                thread.start()  # it takes the lock before it changes what is noted here
            except BaseException:
                link.close()
                raise
            self._serving[link] = thread
            displaced = self._unauthenticated.add(link, address)
            if displaced is not None:
                _cut(displaced)

    def _serve(self, link: socket.socket) -> None:
        try:
            tcp_wire.tune(link)
            stop_s = time.monotonic() + HANDSHAKE_S
            if tcp_wire.greet_reader(link, self._secret, self._incarnation, stop_s, lambda: self._admit(link)):
                self._answer(link)
        except (OSError, struct.error, tcp_wire.Malformed) as error:
            logger.debug("a reader's connection ended: %s", error)
        finally:
            with self._lock:
                self._serving.pop(link, None)
                self._unauthenticated.discard(link)
                self._readers.discard(link)
            link.close()

    def _admit(self, link: socket.socket) -> str:
        """Count a peer that has proven the secret as a reader; else why not."""
        with self._lock:
            self._unauthenticated.discard(link)
            if len(self._readers) >= self._max_readers:
                return f"it {too_many_readers(self._max_readers)}"
            self._readers.add(link)
            return ""

    def _answer(self, link: socket.socket) -> None:
        while True:
            ranges = tcp_wire.receive_request(link, self._region.pool_bytes, STALL_S)
            pool = self._region.bytes()
            tcp_wire.send_data(link, [pool[offset : offset + length] for offset, length in ranges])


def _cut(link: socket.socket) -> None:
    """Wake whoever blocks on this socket, in whatever call."""
    with contextlib.suppress(OSError):  # not connected, or cut already: then nobody blocks on it
        link.shutdown(socket.SHUT_RDWR)
