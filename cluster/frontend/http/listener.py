"""The HTTP port: a listening socket that limits the open connections, in all and per client address.

It counts at `accept`, so a connection counts until its socket is closed, and during its TLS handshake. Knows sockets
only.
"""

import errno
import logging
import os
import socket
import weakref
from collections import Counter
from typing import Any

from cluster.frontend.connection_limits import connection_limits

logger = logging.getLogger(__name__)

REFUSED_AT_ONCE = 64  # then other callbacks of the loop run
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # of these, asyncio tries again after a second
DEAD_S = 40.0  # a dead network ends a connection, as over gRPC
# TCP probes an idle connection: seconds of silence before a probe, interval, number of probes. One with unacknowledged
# data is not probed and has a timeout of its own, in ms.
LIVENESS = (
    *((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2)),
    (socket.TCP_USER_TIMEOUT, round(1000 * DEAD_S)),
)


class Listener(socket.socket):
    """Closes accepted connections beyond the limits. Owned by the server that accepts from it."""

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._max, self._max_per_address = connection_limits(2)
        self._open: Counter[str] = Counter()  # by client address
        self._is_exhausted = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Like `socket.accept`. After many refusals in a row it raises BlockingIOError: asyncio then pauses.

        So it does after an error that asyncio logs, because asyncio calls 2048 times in a row, even after such an error
        (CPython issue 151615).
        """
        if self._is_exhausted:
            self._is_exhausted = False
            raise BlockingIOError
        for _ in range(REFUSED_AT_ONCE):
            try:
                accepted, address = super().accept()
            except OSError as error:
                self._is_exhausted = error.errno in EXHAUSTED
                raise
            host = address[0]
            if self._open.total() < self._max and self._open[host] < self._max_per_address:
                self._open[host] += 1
                counted = _CountedSocket(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
                counted.release = weakref.finalize(counted, self._release, host)
                return counted, address
            accepted.close()
            self._log(host)
        raise BlockingIOError

    def _release(self, host: str) -> None:
        self._open[host] -= 1
        if not self._open[host]:
            del self._open[host]

    def _log(self, host: str) -> None:
        limits, own = f"at most {self._max_per_address} per address, {self._max} in all", self._open[host]
        text = "refused a connection of %s, which has %d of %d (%s)"
        logger.warning(text, host, own, self.num_open, limits, extra={"repeats": True})

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return self._open.total()


class _CountedSocket(socket.socket):
    release: "weakref.finalize[Any, Any]"  # runs once, at the latest when the socket is garbage-collected

    def close(self) -> None:
        super().close()
        self.release()


def listen(host: str, port: int) -> Listener:
    """Raises OSError, with the key of the cluster file to change."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
        for option, value in LIVENESS:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = error.strerror or os.strerror(error.errno or 0)
        where = f"cannot listen on {host}:{port} ({reason})"
        raise OSError(error.errno, f"{where}; choose another gateway.http_port") from None
    listener.setblocking(False)
    return listener
