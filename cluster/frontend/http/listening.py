"""The HTTP port: a listening socket that bounds the open connections, in all and of each client address.

The bound is at `accept`, so a connection counts until its socket is closed, in a TLS handshake too. Knows sockets only.
"""

import logging
import os
import resource
import socket
import time
import weakref
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 4096  # fewer where half of the process's open files are fewer
MOST_CONNECTIONS_OF_ONE = 1024  # of one address, and at most a quarter of all; a proxy is one address
REFUSED_AT_ONCE = 64  # then other callbacks of the loop run
LOG_S = 10.0
# Detects a peer on a dead network, as over gRPC: seconds of silence before a probe, interval, number of probes.
PROBES = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2))


class Listener(socket.socket):
    """Closes what it accepts beyond the bounds. Owned by the server that accepts from it."""

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = open_files == resource.RLIM_INFINITY
        self._most = MOST_CONNECTIONS if unlimited else min(MOST_CONNECTIONS, open_files // 2)
        self._most_of_one = min(MOST_CONNECTIONS_OF_ONE, self._most // 4)
        self._of: Counter[str] = Counter()
        self._logged_s = -LOG_S

    def accept(self) -> tuple[socket.socket, Any]:
        """As a socket's. After many refusals in a row ConnectionAbortedError, which asyncio takes for a pause."""
        for _ in range(REFUSED_AT_ONCE):
            accepted, address = super().accept()
            host = address[0]
            if self._of.total() < self._most and self._of[host] < self._most_of_one:
                self._of[host] += 1
                counted = _Counted(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
                counted.leave = weakref.finalize(counted, self._leave, host)
                return counted, address
            accepted.close()
            self._log(host)
        raise ConnectionAbortedError

    def _leave(self, host: str) -> None:
        self._of[host] -= 1
        if not self._of[host]:
            del self._of[host]

    def _log(self, host: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_S:
            return
        self._logged_s = now_s
        bounds = f"at most {self._most_of_one} of one address, {self._most} in all"
        logger.warning("refused a connection of %s, which has %d of %d (%s)", host, self._of[host], self.held, bounds)

    @property
    def held(self) -> int:
        """Connections that are open."""
        return self._of.total()


class _Counted(socket.socket):
    leave: "weakref.finalize[Any, Any]"  # called once, at the latest when nothing refers to the socket

    def close(self) -> None:
        super().close()
        self.leave()


def listen(host: str, port: int) -> Listener:
    """Raises OSError with words about what to do."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
        for option, value in PROBES:
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
