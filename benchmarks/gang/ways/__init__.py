"""Two ways between a leader and a rank on one machine: the one that gangs use, and the limit beside it.

The leader's end is asked from an event loop, where the engine lives; the rank's end calls on its compute thread.
Each module has both ends:  `await lead(start) -> Delivery`  and  `serve(address, compute)`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

Compute = Callable[[bytes], bytes]
Start = Callable[[str], int]  # the address -> the pid of a rank that was started with it

DEADLINE_S = 2.0  # of one step

# Way -> its module. `bare` is no candidate but the limit: the same bytes over a blocking socket, and nothing else.
LIMIT = "bare socket"
CHOSEN = "tcp stream"
WAYS = {LIMIT: "bare", CHOSEN: "streams"}


class Delivery(Protocol):
    """The leader's end. `pid` is the rank's process."""

    pid: int

    async def deliver(self, plan: bytes) -> bytes:
        """The rank's answer. Raises whatever the way raises when the rank is gone, within `DEADLINE_S`."""
        ...

    def close(self) -> None: ...


def module(way: str) -> Any:
    return import_module(f"{__name__}.{WAYS[way]}")
