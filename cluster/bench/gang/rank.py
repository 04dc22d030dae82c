"""The rank's program: `python -m cluster.bench.gang.rank WAY ADDRESS`. Ends with its leader, however that ends."""

import ctypes
import signal
import sys

from cluster.bench.gang.plans import answer
from cluster.bench.gang.ways import module

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    way, address = sys.argv[1:]
    module(way).serve(way, address, answer)


if __name__ == "__main__":
    main()
