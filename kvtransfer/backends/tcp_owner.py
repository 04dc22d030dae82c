"""The owner's end of our TCP link: serves byte ranges of one registered pool to authenticated readers.

One thread accepts, one thread serves each connection; the bytes go from the pool to the kernel without a copy and
without the GIL. Whatever a reader sends, the worst it can reach is its own connection.
"""

import contextlib
import logging
import socket
import struct
import threading

from kvtransfer.backends import tcp_wire
from kvtransfer.transport import Region

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
HANDSHAKE_S = 5.0
STALL_S = 30.0  # a reader that takes nothing for so long is cut off; it can connect again


class TcpOwner:
    """Owned by its transport. `close` returns when no thread touches the pool any more."""

    def __init__(self, region: Region, host: str, secret: bytes, incarnation: str) -> None:
        self._region = region
        self._secret = secret
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._door = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._door.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name=f"kv-tcp-door-{self.port}", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        return len(self._serving)

    def close(self) -> None:
        """Hang up on everybody. Blocks until the threads have ended: call it off the event loop."""
        with self._lock:
            self._closed = True
            serving = dict(self._serving)
            for link in serving:
                _cut(link)
        _cut(self._door)
        self._accepting.join()
        self._door.close()
        for thread in serving.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._door.accept()
            except OSError as error:
                if not self._closed:
                    logger.error("the transfer port %d stopped accepting: %s", self.port, error)
                return
            with self._lock:
                if self._closed or len(self._serving) >= MAX_CONNECTIONS:
                    link.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(link,), name="kv-tcp-serve", daemon=True)
                self._serving[link] = thread
            thread.start()

    def _serve(self, link: socket.socket) -> None:
        try:
            tcp_wire.tune(link)
            link.settimeout(HANDSHAKE_S)
            if tcp_wire.greet_reader(link, self._secret, self._incarnation):
                self._answer(link)
        except (OSError, struct.error, tcp_wire.Malformed) as error:
            logger.debug("a reader's connection ended: %s", error)
        finally:
            with self._lock:
                self._serving.pop(link, None)
            link.close()

    def _answer(self, link: socket.socket) -> None:
        while True:
            ranges = tcp_wire.receive_request(link, self._region.pool_bytes, STALL_S)
            pool = self._region.bytes()
            tcp_wire.send_data(link, [pool[offset : offset + length] for offset, length in ranges])


def _cut(link: socket.socket) -> None:
    """Wake whoever blocks on this socket, in whatever call."""
    with contextlib.suppress(OSError):  # not connected, or cut already: then nobody blocks on it
        link.shutdown(socket.SHUT_RDWR)
