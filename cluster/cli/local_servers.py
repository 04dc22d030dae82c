"""The gateways that run on this machine, a file for each, by which other commands of the same user find the last one.

A file whose process is gone, or whose gateway does not accept connections, was left behind by a killed process and is
removed when it is seen.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cluster.runtime.sessions import folder

CONNECT_S = 1.0
DEFAULT_ENDPOINT = "127.0.0.1:50051"


class LocalServer(msgspec.Struct, frozen=True):
    """`endpoint` is what a client takes: grpc://HOST:PORT, or grpcs:// with TLS."""

    endpoint: str
    pid: int
    started_s: float


@contextmanager
def announced(endpoint: str) -> Iterator[None]:
    """Say that this process serves at `endpoint`, for as long as the block lasts. Serving itself needs no file."""
    path = _folder() / f"{os.getpid()}.json"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(LocalServer(endpoint, os.getpid(), time.time())))
        fresh.rename(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def last_endpoint() -> str:
    """Of the gateway that started last on this machine and still runs; the default address when there is none."""
    try:
        paths = list(_folder().glob("*.json"))
    except ModuleNotFoundError:  # the client is installed without what serving needs
        return DEFAULT_ENDPOINT
    for server, path in sorted(_read(paths), key=lambda each: each[0].started_s, reverse=True):
        if _lives(server):
            return server.endpoint
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return DEFAULT_ENDPOINT


def _folder() -> Path:
    return folder() / "gateways"


def _read(paths: list[Path]) -> Iterator[tuple[LocalServer, Path]]:
    """Files of other users are not looked at."""
    for path in paths:
        with suppress(OSError, msgspec.MsgspecError):
            if path.stat().st_uid == os.getuid():
                yield msgspec.json.decode(path.read_bytes(), type=LocalServer), path


def _lives(server: LocalServer) -> bool:
    host, _, port = server.endpoint.rpartition("://")[2].rpartition(":")
    try:
        with suppress(PermissionError):
            os.kill(server.pid, 0)
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
