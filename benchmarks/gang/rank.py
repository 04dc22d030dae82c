"""The rank's program: `python -m benchmarks.gang.rank WAY ADDRESS`. Ends with its leader, however that ends."""

import ctypes
import signal
import sys

from benchmarks.gang.plans import answer
from benchmarks.gang.ways import module

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    way, address = sys.argv[1:]
    module(way).serve(address, answer)


if __name__ == "__main__":
    main()
