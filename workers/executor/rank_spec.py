"""What one rank of a gang needs before it starts, and the port to what starts it.

Plain values; knows no torch, so that any process can hold them.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workers.config import ParallelConfig, WorkerConfig


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A rank's number in its gang, and the store where the ranks' process groups find each other."""

    rank: int
    store_host: str
    store_port: int


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that a rank needs to start: its worker's configuration, its rendezvous, and its leader's address."""

    config: WorkerConfig
    incarnation: str
    rendezvous: Rendezvous
    leader_host: str
    leader_port: int


def sampling_rank(parallel: ParallelConfig) -> int:
    """The first rank of the last stage, which has the logits."""
    return (parallel.pipeline - 1) * parallel.tensor


class RankLauncher(Protocol):
    """Runs `rank_server.serve_rank` somewhere. Each gang has its own launcher and calls `launch` once."""

    def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[Any]]:
        """Start the ranks; each awaitable ends when its rank has ended, for whatever reason."""
        ...

    async def end(self) -> None:
        """Kill the ranks that are still running."""
        ...
