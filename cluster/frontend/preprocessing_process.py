"""The child process of `cluster.frontend.preprocessing`: pickled calls on stdin, pickled results on stdout.

Exits at the end of its input, that is, with its parent; or at its time limit, even if the parent is alive.
"""

import contextlib
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from cluster.frontend.preprocessing import HEADER

GRACE_S = 5.0  # beyond the time limit, in which a live parent kills it


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; the end of stdin ends this process
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write into the results
    _prefer_oom_kill()
    load, limit_s = pickle.loads(_read_frame(calls))
    tokenizer = load()
    _write_frame(results, (True, None))
    while call := _read_frame(calls):
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)  # SIGALRM ends the process even in C code
        _write_frame(results, _result(tokenizer, call))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _result(tokenizer: object, call: bytes) -> tuple[bool, Any]:
    """(True, return value) or (False, error)."""
    function, args = pickle.loads(call)
    try:
        return True, function(tokenizer, *args)
    except Exception as error:  # the parent raises it
        return False, error


def _read_frame(stream: BinaryIO) -> bytes:
    """Empty at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return b""
    return stream.read(HEADER.unpack(header)[0])


def _write_frame(stream: BinaryIO, result: tuple[bool, Any]) -> None:
    data = pickle.dumps(result)
    stream.write(HEADER.pack(len(data)))
    stream.write(data)
    stream.flush()


def _prefer_oom_kill() -> None:
    """Make the kernel kill this process rather than the gateway when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)  # the parent is gone
