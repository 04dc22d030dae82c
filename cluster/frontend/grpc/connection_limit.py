"""Limits the connections of a client address to the gRPC port. Knows sockets only.

grpc limits connections in all, and shows none of them before its first call. So they are looked up among the open files
of this process, and those of an address beyond its limit are shut down: grpc then closes them.
"""

import asyncio
import logging
import os
import socket
import stat
from collections import defaultdict
from contextlib import suppress
from urllib.parse import unquote

logger = logging.getLogger(__name__)

COUNT_S = 1.0  # nothing tells when grpc accepts a connection
FILES = "/proc/self/fd"


class ConnectionLimit:
    """Owned by the server that listens on `port`, once it does. `max_per_address`: connections of an address."""

    def __init__(self, max_per_address: int, port: int = 0) -> None:
        self.port = port
        self._max_per_address = max_per_address
        self._hosts: dict[int, str | None] = {}  # of each open socket by its inode, oldest first; None: not of the port

    async def run(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            try:
                await asyncio.to_thread(self.close_excess)  # thousands take a while
            except OSError as error:  # such as no descriptor left to count with
                logger.warning("cannot count the gRPC connections: %s", error, extra={"repeats": True})

    def close_excess(self) -> None:
        """Shut the newest connections of each address beyond its limit down. Raises `OSError`."""
        files = _sockets()
        known = {inode: host for inode, host in self._hosts.items() if inode in files}
        self._hosts = known | {inode: self._host(file) for inode, file in files.items() if inode not in known}
        by_host = defaultdict[str, list[int]](list)
        for inode, host in self._hosts.items():
            if host is not None:
                by_host[host].append(inode)
        for host, inodes in by_host.items():
            excess = inodes[self._max_per_address :]
            for inode in excess:
                _shut_down(files[inode], inode)
            if excess:
                text = "closed %d gRPC connections of %s, which had %d (at most %d per address)"
                logger.warning(text, len(excess), host, len(inodes), self._max_per_address, extra={"repeats": True})

    def close(self, peer: str) -> None:
        """Shut the connection of a call down. `peer`: of its context, such as ipv4:127.0.0.1:1234. Raises `OSError`."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        for inode, file in _sockets().items():
            if self._peer(file) == (host.strip("[]"), int(port)):
                _shut_down(file, inode)

    def _host(self, file: int) -> str | None:
        peer = self._peer(file)
        return None if peer is None else peer[0]

    def _peer(self, file: int) -> tuple[str, int] | None:
        """The client's address and port. None: no connection of a client, or it ended."""
        try:
            found = socket.socket(fileno=file)
        except OSError:
            return None
        try:
            is_ours = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == self.port
            host, port, *_ = found.getpeername() if is_ours else ("", 0)
            return (str(host).removeprefix("::ffff:"), int(port)) if is_ours else None
        except OSError:
            return None
        finally:
            found.detach()  # grpc owns it


def _sockets() -> dict[int, int]:
    """The files of this process that are sockets, by inode."""
    files = [int(name) for name in os.listdir(FILES)]
    return {inode: file for file in files if (inode := _socket_inode(file))}


def _socket_inode(file: int) -> int:
    """0: no socket, or closed."""
    try:
        found = os.fstat(file)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0


def _shut_down(file: int, inode: int) -> None:
    """Unless it was closed meanwhile: its number may then be that of another file."""
    try:
        held = os.dup(file)
    except OSError as error:
        logger.debug("connection %d has ended: %s", inode, error)
        return
    if _socket_inode(held) != inode:
        os.close(held)
        return
    with socket.socket(fileno=held) as connection, suppress(OSError):  # the client has closed it
        connection.shutdown(socket.SHUT_RDWR)
