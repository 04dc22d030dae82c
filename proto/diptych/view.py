"""An immutable view of the cluster: workers, pools, links, gateways, recent decisions. Pure."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from msgspec import Struct, field, structs

from diptych.events import TransferReport

MAX_RANKS = 1024
PLACEMENTS = ("pack", "strict_pack", "spread", "strict_spread")


class Role(Enum):
    """What a pool is for. Workers themselves can do all three."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many ranks share a layer (tensor) and how many stages share the layers (pipeline).

    Rank = stage * tensor + its place in the stage.
    """

    tensor: int = 1
    """Ranks that share every layer. More: shorter steps, and a sum over ranks twice a layer."""
    pipeline: int = 1
    """Stages that share the layers, one behind the other. More: more memory and throughput, no shorter decodes."""
    placement: str = "pack"
    """Where the ranks go: `pack` on one node if they fit and on few otherwise, `spread` over many; with `strict_`,
    exactly one node, or a node for each rank.
    """

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.pipeline < 1:
            raise ValueError(f"parallel: tensor {self.tensor} and pipeline {self.pipeline} must be at least 1")
        if self.world_size > MAX_RANKS:
            raise ValueError(f"parallel: {self.tensor} x {self.pipeline} are more than {MAX_RANKS} ranks")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"parallel.placement {self.placement!r} is not one of {', '.join(PLACEMENTS)}")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline


class Pulls(Struct, frozen=True, gc=False):
    """KV that this worker fetched from others, since it began. Made anew when a pull ends: statistics only name it.

    `failed` ended without all of the KV, `corrupt` of them by a digest; the rest speaks of those that arrived.
    """

    arrived: int = 0
    failed: int = 0
    corrupt: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0

    def arrival(self, report: TransferReport) -> "Pulls":
        return structs.replace(
            self,
            arrived=self.arrived + 1,
            num_bytes=self.num_bytes + report.num_bytes,
            num_descriptors=self.num_descriptors + report.num_descriptors,
            seconds=self.seconds + report.elapsed_s,
        )

    def failure(self, *, corrupt: bool) -> "Pulls":
        return structs.replace(self, failed=self.failed + 1, corrupt=self.corrupt + corrupt)


NO_PULLS = Pulls()


class WorkerStats(Struct, frozen=True, gc=False):
    """`queued_tokens`: prompt tokens still to compute. `reserved`: decode slots whose KV has not arrived.

    free + used (sequences, leases and quarantine together) = total blocks; `cached_blocks` is the part of `free`
    that still holds a reusable prefix.
    """

    queued_tokens: int = 0
    waiting: int = 0
    running: int = 0
    reserved: int = 0
    leases: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    step_s: float = 0.0  # moving average of the latest steps
    preemptions: int = 0
    swaps: int = 0  # preemptions that saved the KV in host memory; the others compute it again
    swapped_blocks: int = 0
    expired_leases: int = 0
    bubble_share: float = 0.0  # idle share of the stages' time while anything was in flight, lately
    cache_number: int = 0  # the newest event of its cache; see `KVEvents`
    sought_tokens: int = 0  # of prompts that were given blocks, and how many of them a cache had
    found_tokens: int = 0
    pulls: Pulls = NO_PULLS
    non_finite: int = 0  # requests that ended because their logits were NaN or infinite


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
    failures: int = 0  # in a row: starts that failed or did not last
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
    """What gateways must know of the served model.

    `default_sampling`: (name, value) of what its makers recommend, by the names of `SamplingOptions`.
    """

    name: str
    context_length: int
    vocab_size: int
    default_sampling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool: the role its workers begin with, how many there shall be, and the bounds of scaling."""

    name: str
    role: Role
    wanted: int
    min_replicas: int
    max_replicas: int


class GatewayState(Enum):
    OPEN = "open"
    SILENT = "silent"  # it does not answer; its process may live
    STARTING = "starting"  # again, after its death


@dataclass(frozen=True, slots=True)
class GatewayView:
    """A gateway that the server of this cluster started. `silences`: how often it did not answer in time."""

    name: str
    state: GatewayState
    restarts: int = 0
    silences: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TaskFailures:
    """How often a background task met an exception since its process began. It goes on after each."""

    process: str
    task: str
    count: int


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What preflight found for one pair (reader <- owner): the chosen path and its measured quality.

    Where ranks read from several ranks, the numbers are those of the slowest link, and the names are joined.
    """

    reader: str
    owner: str
    transport: str
    path: str  # e.g. "UCX cma/memory", "tcp 127.0.0.1:41233", "in-process copy"
    latency_s: float
    bytes_per_s: float
    skipped: tuple[str, ...] = ()  # "nixl: no CMA between the two (other pid namespace)", ...


@dataclass(frozen=True, slots=True)
class ClusterView:
    """`revision` grows with every change of membership or state; statistics alone do not change it.

    `pairs` is an index of the links, (owner, reader); None: they are searched one by one. `gateways`: all there are, as
    far as this one knows, the one that has been there for the longest first; `served_gateways`: how those do that the
    server of this cluster started.
    """

    revision: int
    name: str
    model: ModelView | None
    workers: tuple[WorkerView, ...]
    links: tuple[LinkReport, ...] = ()
    pairs: frozenset[tuple[str, str]] | None = None
    pools: tuple[PoolView, ...] = ()
    gateways: tuple[str, ...] = ()
    served_gateways: tuple[GatewayView, ...] = ()
    failures: tuple[TaskFailures, ...] = ()

    def ready(self, *roles: Role) -> tuple[WorkerView, ...]:
        return tuple(worker for worker in self.workers if worker.state is WorkerState.READY and worker.role in roles)

    def linked(self, owner: str, reader: str) -> bool:
        """Whether preflight let KV flow from owner to reader."""
        if self.pairs is not None:
            return (owner, reader) in self.pairs
        return any(link.owner == owner and link.reader == reader for link in self.links)


@dataclass(frozen=True, slots=True)
class Decision:
    """One step: a worker flips to a role, or a pool grows or shrinks by one worker (`worker`: which one leaves). Or a
    plan: the roles of all, which the steps after it lead to.

    `reason` explains it to a person, with the figures it rests on.
    """

    kind: Literal["flip", "grow", "shrink"]
    reason: str
    worker: str = ""
    role: Role | None = None
    pool: str = ""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision of the elastic policy, `age_s` seconds old, and what became of it.

    `outcome`: "advised", "under way", "done", or "failed: " and why.
    """

    decision: Decision
    age_s: float
    outcome: str
