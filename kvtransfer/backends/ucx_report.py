"""UCX's report on the path that it chose, and the environment variables for loading it.

UCX prints a table for each kind of operation once it has chosen a protocol. Here it prints to an anonymous file
instead of stderr, and the table names the fabric of remote reads: a path is always reported, never guessed. UCX has
one log file per process, and so has this module.
"""

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Iterator

from kvtransfer.host import rdma_devices

DEFAULTS = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
DEFAULTS["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"  # else GPUs without NVLink are read over TCP

_TITLE = re.compile(r"\| remote memory read by [^|]*\|")
_ROW = re.compile(r"\|\s*\d\S*\.\.\S+\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\||\|\s*0\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|")


@functools.cache
def _log_file() -> int | None:
    """The descriptor of UCX's log, one for the process; None if the user sets the log's place."""
    if "UCX_LOG_FILE" in os.environ or "UCX_PROTO_INFO" in os.environ or not hasattr(os, "memfd_create"):
        return None
    return os.memfd_create("ucx-log")


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Load NIXL and create its backend inside. Keeps variables that the user has set; unsets the log's again."""
    log = _log_file()
    defaults = dict(DEFAULTS)
    if not rdma_devices():
        defaults["UCX_MODULES"] = "^ib"
    passing = {} if log is None else {"UCX_LOG_FILE": f"/proc/self/fd/{log}", "UCX_PROTO_INFO": "y"}
    for name, value in (defaults | passing).items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in passing:
            os.environ.pop(name, None)


def position() -> int:
    """The length of the report so far, for `read_paths`."""
    return len(_text())


def read_paths(after: int = 0) -> tuple[str, ...]:
    """Fabrics of remote reads ("cma/memory", "tcp/lo: software emulation") in the report from `after` on."""
    return parse_read_paths(_text()[after:])


def parse_read_paths(text: str) -> tuple[str, ...]:
    paths: set[str] = set()
    inside, rules = False, 0
    for line in text.splitlines():
        if _TITLE.search(line):
            inside, rules = True, 0
        elif inside and "+--" in line:
            rules += 1
            inside = rules < 3  # below the title, below the heads of the columns, below the rows
        elif inside and (row := _ROW.search(line)):
            description, fabric = (part for part in row.groups() if part is not None)
            paths.add(f"{fabric}: {description}" if "emulation" in description else fabric)
    return tuple(sorted(paths))


def _text() -> str:
    log = _log_file()
    if log is None:
        return ""
    ctypes.CDLL(None).fflush(None)  # UCX writes through a buffered stream
    return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")
