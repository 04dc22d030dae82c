"""One file per gateway that runs on this machine, so that other commands of the same user find the latest one.

A killed process leaves its file behind. Readers remove files whose process is gone, or whose gateway does not accept
connections.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cluster.runtime.sessions import folder, is_served, read_records, write_record

DEFAULT_ENDPOINT = "127.0.0.1:50051"


class LocalServer(msgspec.Struct, frozen=True):
    """`endpoint`: grpc://HOST:PORT, or grpcs:// with TLS."""

    endpoint: str
    pid: int
    started_s: float


@contextmanager
def announced(endpoint: str) -> Iterator[None]:
    """Record during the block that this process serves at `endpoint`. Ignores a failed write."""
    path: Path | None = None
    with suppress(OSError):
        path = write_record(_folder(), LocalServer(endpoint, os.getpid(), time.time()), os.getpid())
    try:
        yield
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def last_endpoint() -> str:
    """The address of the running gateway that started last on this machine; the default address if there is none."""
    try:
        records = list(read_records(_folder(), LocalServer))
    except ModuleNotFoundError:  # the package is installed without the `serve` extra
        return DEFAULT_ENDPOINT
    for server, path in sorted(records, key=lambda each: each[0].started_s, reverse=True):
        if is_served(server.endpoint.rpartition("://")[2], server.pid):
            return server.endpoint
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return DEFAULT_ENDPOINT


def _folder() -> Path:
    return folder() / "gateways"
