"""Two transports between a leader and a rank on one machine: the one that gangs use, and the limit.

The leader's end runs on the engine's event loop; the rank's end calls `compute` on its compute thread.
Each module has both ends:  `await lead(start) -> Delivery`  and  `serve(address, compute)`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

Compute = Callable[[bytes], bytes]
Start = Callable[[str], int]  # the address -> the pid of a rank that was started with it

DEADLINE_S = 2.0  # of one step

# Transport -> its module. `LIMIT` only bounds the others: the same bytes over a blocking socket.
LIMIT = "bare socket"
CHOSEN = "tcp stream"
TRANSPORTS = {LIMIT: "blocking_socket", CHOSEN: "tcp_stream"}


class Delivery(Protocol):
    """The leader's end. `pid` is the rank's process."""

    pid: int

    async def deliver(self, plan: bytes) -> bytes:
        """Send the plan and return the rank's answer. Raises within `DEADLINE_S` when the rank is gone."""
        ...

    def close(self) -> None: ...


def module(transport: str) -> Any:
    return import_module(f"{__name__}.{TRANSPORTS[transport]}")
