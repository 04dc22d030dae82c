"""What UCX reports about the path it chose, and the environment in which it is loaded.

UCX prints a table for each kind of operation once it has chosen a protocol. We have it written to an anonymous file
instead of stderr, and read there which fabric remote reads take: a path is known because UCX reported it, never
because it is likely. UCX keeps its log file per process, so this file does too.
"""

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Iterator

from kvtransfer.host import rdma_devices

QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}

_TITLE = re.compile(r"\| remote memory read by [^|]*\|")
_ROW = re.compile(r"\|\s*\d\S*\.\.\S+\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\||\|\s*0\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|")


@functools.cache
def _log_file() -> int | None:
    """The descriptor UCX logs to, or None where the user wants its log elsewhere. One for the process, as in UCX."""
    if "UCX_LOG_FILE" in os.environ or "UCX_PROTO_INFO" in os.environ or not hasattr(os, "memfd_create"):
        return None
    return os.memfd_create("ucx-log")


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Load NIXL and create its backend inside. Only what the user left unset is set; the log settings go again."""
    log = _log_file()
    defaults = dict(QUIET)
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
    """How much UCX has reported so far: `read_paths` can skip it."""
    return len(_text())


def read_paths(after: int = 0) -> tuple[str, ...]:
    """Fabrics UCX chose for remote reads ("cma/memory", "tcp/lo: software emulation"), reported since `after`."""
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
