"""Ports for servers that are started later, in other processes."""

import itertools
import os
import socket

# Below the range from which the system takes ports for sockets that ask for any: none of them is taken meanwhile.
FIRST, LAST = 20000, 32000
_candidates = itertools.cycle(range(FIRST, LAST))
for _ in range(os.getpid() * 97 % (LAST - FIRST)):  # processes that test at the same time begin elsewhere
    next(_candidates)


def free_port() -> int:
    """A port of the loopback address on which nobody listens."""
    for port in itertools.islice(_candidates, LAST - FIRST):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {FIRST} to {LAST} is free")
