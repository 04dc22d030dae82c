"""The gateways that run on this machine, a file for each, by which other commands of the same user find the last one.

A file whose process is gone, or whose gateway does not accept connections, was left behind by a killed process and is
removed when it is seen.
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
    """`endpoint` is what a client takes: grpc://HOST:PORT, or grpcs:// with TLS."""

    endpoint: str
    pid: int
    started_s: float


@contextmanager
def announced(endpoint: str) -> Iterator[None]:
    """Say that this process serves at `endpoint`, for as long as the block lasts. Serving itself needs no file."""
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
    """Of the gateway that started last on this machine and still runs; the default address when there is none."""
    try:
        records = list(read_records(_folder(), LocalServer))
    except ModuleNotFoundError:  # the client is installed without what serving needs
        return DEFAULT_ENDPOINT
    for server, path in sorted(records, key=lambda each: each[0].started_s, reverse=True):
        if is_served(server.endpoint.rpartition("://")[2], server.pid):
            return server.endpoint
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return DEFAULT_ENDPOINT


def _folder() -> Path:
    return folder() / "gateways"
