"""The process behind `cluster.frontend.preprocessing`: pickled work on stdin, pickled results on stdout.

Ends with its parent, at the end of its input; or at its time limit, even if its parent is alive.
"""

import contextlib
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from cluster.frontend.preprocessing import HEADER

GRACE_S = 5.0  # in which the parent ends it, if there is one


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; the end of stdin ends this process
    frames, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    _is_first_to_go()
    load, limit_s = pickle.loads(_frame(frames))
    tokenizer = load()
    _answer(answers, (True, None))
    while work := _frame(frames):
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)  # its default action ends a process even in C code
        _answer(answers, _done(tokenizer, work))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _done(tokenizer: object, work: bytes) -> tuple[bool, Any]:
    function, args = pickle.loads(work)
    try:
        return True, function(tokenizer, *args)
    except Exception as error:  # the caller's to raise
        return False, error


def _frame(stream: BinaryIO) -> bytes:
    """Empty at the end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return b""
    return stream.read(HEADER.unpack(header)[0])


def _answer(stream: BinaryIO, answer: tuple[bool, Any]) -> None:
    data = pickle.dumps(answer)
    stream.write(HEADER.pack(len(data)))
    stream.write(data)
    stream.flush()


def _is_first_to_go() -> None:
    """Where memory ends, the system ends this process rather than the gateway."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)  # the parent is gone
