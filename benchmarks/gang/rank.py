"""The rank's program: `python -m benchmarks.gang.rank TRANSPORT ADDRESS`. Ends with its leader."""

import ctypes
import signal
import sys

from benchmarks.gang.plans import answer
from benchmarks.gang.transports import module

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    transport, address = sys.argv[1:]
    module(transport).serve(address, answer)


if __name__ == "__main__":
    main()
