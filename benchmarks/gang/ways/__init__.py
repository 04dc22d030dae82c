"""Ways between a leader and a rank on one machine, each as an honest program that could serve a gang.

The leader's end is asked from an event loop, where the engine lives; the rank's end calls on its compute thread.
Each module has both ends:  `await lead(way, start) -> Delivery`  and  `serve(way, address, compute)`;
but Ray starts its ranks itself.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

Compute = Callable[[bytes], bytes]
Start = Callable[[str], int]  # the address -> the pid of a rank that was started with it

DEADLINE_S = 2.0  # of one step
IDLE_S = 60.0  # how long a rank waits for a plan before it gives up

# Way -> its module. `bare` is no candidate but the limit: the same bytes over a blocking socket, and nothing else.
WAYS = {
    "bare socket": "bare",
    "unix stream": "streams",
    "tcp stream": "streams",
    "tcp, rank blocks": "streams",
    "shm, futex": "shared",
    "shm, spinning": "shared",
    "gloo broadcast": "gloo",
    "ray call": "actor",
}
LIMIT = "bare socket"
CHOSEN = "tcp stream"
DEADLINE_ONLY = ("shm, futex", "shm, spinning")  # nothing tells them of a death


class Delivery(Protocol):
    """The leader's end. `pid` is the rank's process."""

    pid: int

    async def deliver(self, plan: bytes) -> bytes:
        """The rank's answer. Raises whatever the way raises when the rank is gone, within `DEADLINE_S`."""
        ...

    def close(self) -> None: ...


def module(way: str) -> Any:
    return import_module(f"{__name__}.{WAYS[way]}")
