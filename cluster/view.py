"""An immutable picture of the cluster: who is there and how they are doing. What policies look at."""

from dataclasses import dataclass
from enum import Enum

from msgspec import Struct, field

from cluster.spec import Role
from kvtransfer.ticket import LinkReport
from workers.config import ParallelConfig
from workers.stats import WorkerStats


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class WorkerView(Struct, frozen=True, gc=False):
    """One worker. `capacity_tokens`: the longest sequence its pool can hold; `age_s`: since it last spoke.

    `waits_for`: what it needs of a node, while it has none.
    """

    name: str
    pool: str
    role: Role
    state: WorkerState
    incarnation: str = ""
    node: str = ""
    pid: int = 0
    restarts: int = 0
    capacity_tokens: int = 0
    age_s: float = 0.0
    memory_bytes: int = 0
    kv_token_bytes: int = 0  # of one token, on all its ranks together
    detail: str = ""
    waits_for: str = ""
    audit: str = ""  # "clean", or what does not balance; empty when not asked for
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stats: WorkerStats = field(default_factory=WorkerStats)

    @property
    def trouble(self) -> str:
        """What it waits for, and what was wrong with it last, in words."""
        waiting = f"waits for a node: {self.waits_for}" if self.waits_for else ""
        return "; ".join(filter(None, (waiting, self.detail)))


@dataclass(frozen=True, slots=True)
class ModelView:
    """What gateways must know of the served model."""

    name: str
    context_length: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool: the role its workers begin with, how many there shall be, and how few and many it may have by itself."""

    name: str
    role: Role
    wanted: int
    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """`revision` grows with every change of membership or state; statistics alone do not change it.

    `pairs` is an index of the links, (owner, reader); None: they are searched one by one. `gateways`: all there are, as
    far as this one knows, the one that has been there for the longest first.
    """

    revision: int
    name: str
    model: ModelView | None
    workers: tuple[WorkerView, ...]
    links: tuple[LinkReport, ...] = ()
    pairs: frozenset[tuple[str, str]] | None = None
    pools: tuple[PoolView, ...] = ()
    gateways: tuple[str, ...] = ()

    def ready(self, *roles: Role) -> tuple[WorkerView, ...]:
        return tuple(worker for worker in self.workers if worker.state is WorkerState.READY and worker.role in roles)

    def linked(self, owner: str, reader: str) -> bool:
        """Whether preflight let KV flow from owner to reader."""
        if self.pairs is not None:
            return (owner, reader) in self.pairs
        return any(link.owner == owner and link.reader == reader for link in self.links)
