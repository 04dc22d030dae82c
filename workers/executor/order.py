"""What one rank of a gang needs before it starts, and the port to whatever starts it.

Plain values; knows no torch, so that any process may hold them.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workers.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in its gang: its number, and the store through which the ranks' process groups meet."""

    rank: int
    store_host: str
    store_port: int


@dataclass(frozen=True, slots=True)
class RankOrder:
    """All that a rank needs to start: its worker's configuration, its seat, and where its leader listens."""

    config: WorkerConfig
    incarnation: str
    seat: Seat
    leader_host: str
    leader_port: int


class RankLauncher(Protocol):
    """Whatever runs `rank_server.serve_rank` somewhere: one call of `launch` for each gang."""

    def launch(self, orders: Sequence[RankOrder]) -> Sequence[Awaitable[Any]]:
        """Start the ranks; each awaitable ends when its rank has ended, whatever ended it."""
        ...

    async def end(self) -> None:
        """End what still runs, without asking."""
        ...
