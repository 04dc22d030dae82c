"""An immutable view of the cluster: workers, pools, links, gateways, recent decisions. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from msgspec import Struct, field, structs

from diptych.events import TransferReport

MAX_RANKS = 1024
PLACEMENTS = ("pack", "strict_pack", "spread", "strict_spread")


class Role(Enum):
    """The work that gateways send to a pool or a worker. Every worker can do all of it."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    __hash__ = object.__hash__  # Enum's own is a Python function


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Tensor and pipeline parallelism. Rank = stage * tensor + its place in the stage."""

    tensor: int = 1
    """Ranks that share every layer. More: shorter steps, and two all-reduces per layer."""
    pipeline: int = 1
    """Stages that share the layers, one after the other. More: more memory and throughput, no shorter decodes."""
    placement: str = "pack"
    """Nodes of the ranks: `pack` uses one node if they fit, else few; `spread` uses many. With `strict_`: exactly one
    node, or one node per rank.
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
    """KV fetches of a worker since it started. Replaced at the end of each pull, so that statistics can share it.

    `failed`: ended without all of the KV; `corrupt`: those of them with a wrong digest. The other fields are sums over
    the fetches that arrived.
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


class TierStats(Struct, frozen=True, gc=False):
    """A tier of a worker's prefix cache behind its device, since the worker started. `name`: host or disk.

    `hit_tokens`: of prompts. `saved_s`: of computing these, less loading them. `lent_tokens`: that other workers
    fetched from here. `dropped_blocks`: it should have got them, but saving was not worth it or it was too busy.
    `late`: reads and writes past their deadline. `failures`: those that failed, and reads of other bytes. `problem`:
    why it is no longer read or written.
    """

    name: str
    blocks: int = 0
    capacity_blocks: int = 0
    block_bytes: int = 0
    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0
    late: int = 0
    failures: int = 0
    problem: str = ""
    pinned_blocks: int = 0
    saved_s: float = 0.0
    lent_tokens: int = 0

    @property
    def trouble(self) -> str:
        """Why it does not work; empty: it does, as far as known."""
        stores_nothing = self.dropped_blocks and not self.written_bytes and not self.blocks
        return self.problem or (f"stores nothing: dropped {self.dropped_blocks} blocks" if stores_nothing else "")


REFUSALS = ("no-room", "recalls", "busy", "block-size", "dtype", "lost", "timeout", "failed")


class BorrowStats(Struct, frozen=True, gc=False):
    """What a worker borrows from one lender: its sequences' blocks there, and counts since its start.

    `oldest_s`: age of the oldest loan. `refusals` are pairs of a reason and a count. Reasons (`REFUSALS`): the lender
    has no room, recalls loans for its own requests, is busy extending that loan, or has blocks or a dtype that do not
    fit; it is lost, was too slow, or the KV did not arrive there.
    """

    lender: str
    blocks: int = 0
    num_bytes: int = 0
    oldest_s: float = 0.0
    loans: int = 0
    recalls: int = 0
    refusals: tuple[tuple[str, int], ...] = ()


class WorkerStats(Struct, frozen=True, gc=False):
    """`queued_tokens`: prompt tokens still to compute. `reserved`: decode slots whose KV has not arrived.

    free + used (sequences, leases and quarantine together) = total blocks. `cached_blocks`: the free blocks that hold a
    reusable prefix.
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
    expired_leases: int = 0
    lent_blocks: int = 0
    borrowed_blocks: int = 0
    expired_loans: int = 0
    borrowed: tuple[BorrowStats, ...] = ()  # from each lender
    bubble_share: float = 0.0  # recent idle share of the stages' time while a step was in flight
    cache_number: int = 0  # number of the newest cache event; see `KVEvents`
    sought_tokens: int = 0  # prompt tokens looked up in the prefix cache
    found_tokens: int = 0  # those of them that were cached, in any tier
    tiers: tuple[TierStats, ...] = ()  # behind the device
    pulls: Pulls = NO_PULLS
    fetched_tokens: int = 0  # of the found tokens, those that were fetched from other workers
    fetched_saved_s: float = 0.0  # as `TierStats.saved_s`, of these
    device_saved_s: float = 0.0  # the same, of what was on the device
    device_lent_tokens: int = 0  # as `TierStats.lent_tokens`, from the device
    non_finite: int = 0  # requests that ended because their logits were NaN or infinite
    adapters: tuple[str, ...] = ()  # ids of those in its memory
    decode_ratio: float = 1.0  # learned: of the time of decodes to that by the costs of its pool
    prompt_ratio: float = 1.0  # the same of prompts

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks

    @property
    def device_hit_tokens(self) -> int:
        """Those of the found tokens that were on the device."""
        return self.found_tokens - self.fetched_tokens - sum([tier.hit_tokens for tier in self.tiers])

    @property
    def sources(self) -> tuple[TierStats, ...]:
        """Where prompts found cached tokens: the device, other workers ("fetched"), and the tiers behind the device."""
        device = TierStats(
            "device",
            self.cached_blocks,
            self.total_blocks,
            hit_tokens=self.device_hit_tokens,
            saved_s=self.device_saved_s,
            lent_tokens=self.device_lent_tokens,
        )
        fetched = TierStats("fetched", hit_tokens=self.fetched_tokens, saved_s=self.fetched_saved_s)
        return device, fetched, *self.tiers


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """What a worker has of a prompt: cached tokens, or tokens that were unpinned. `problem`: why it did not."""

    worker: str
    tokens: int = 0
    problem: str = ""


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class WorkerView(Struct, frozen=True, gc=False):
    """One worker. `capacity_tokens`: the longest sequence that its KV pool can hold. `age_s`: since its last message.

    `waits_for`: the resources that it needs from a node, while it has none.
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
    kv_token_bytes: int = 0  # KV of one token, on all its ranks together
    disk_byte_s: float = 0.0  # seconds to read a byte of KV from its disk; 0: it has none
    remote_byte_s: float = 0.0  # the same of its remote server
    remote_store: str = ""  # equal for workers that read the same blocks from the same remote server
    detail: str = ""
    waits_for: str = ""
    failures: int = 0  # in a row: starts that failed or did not last
    audit: str = ""  # "clean", or the error; empty without an audit
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stats: WorkerStats = field(default_factory=WorkerStats)

    @property
    def trouble(self) -> str:
        """What it waits for, and its last problem, as text."""
        waiting = f"waits for a node: {self.waits_for}" if self.waits_for else ""
        return "; ".join(filter(None, (waiting, self.detail)))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of the served model `model`, in the PEFT folder `path`, which is the same on every node.

    `id`: a digest of its files. `num_bytes`: of its numbers in float32.
    """

    name: str
    model: str
    path: str
    id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ModelView:
    """The served model, as gateways need it.

    `default_sampling`: the model's recommendations as (name, value), with the names of `SamplingOptions`.
    """

    name: str
    context_length: int
    vocab_size: int
    default_sampling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool: the role that its workers start with, their target number, and the bounds of autoscaling."""

    name: str
    role: Role
    wanted: int
    min_replicas: int
    max_replicas: int
    model: str = ""


class GatewayState(Enum):
    OPEN = "open"
    SILENT = "silent"  # it does not answer; its process may be alive
    STARTING = "starting"  # it died and is restarted


@dataclass(frozen=True, slots=True)
class GatewayView:
    """A gateway that `diptych serve` started. `silences`: how often it did not answer in time."""

    name: str
    state: GatewayState
    restarts: int = 0
    silences: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TaskFailures:
    """How often a background task raised an exception since its process started. The task continues after each."""

    process: str
    task: str
    count: int


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The result of a pair's preflight: the path that reader pulls from owner by, and its measured quality.

    If ranks read from several ranks, the numbers are those of the slowest link, and the names are joined. They are 0 if
    the link was only verified.
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
    """`revision` grows with every change of membership or state; statistics do not change it.

    `links`: measured links; all in a small cluster, else some of each two pools. `unlinked`: pairs (owner, reader)
    between which KV cannot move. `gateways`: all known gateways, oldest first. `served_gateways`: those that `diptych
    serve` started. `other_models`: served beside `model`.
    """

    revision: int
    name: str
    model: ModelView | None
    workers: tuple[WorkerView, ...]
    links: tuple[LinkReport, ...] = ()
    unlinked: frozenset[tuple[str, str]] = frozenset()
    pools: tuple[PoolView, ...] = ()
    gateways: tuple[str, ...] = ()
    served_gateways: tuple[GatewayView, ...] = ()
    failures: tuple[TaskFailures, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    other_models: tuple[ModelView, ...] = ()

    @property
    def models(self) -> tuple[ModelView, ...]:
        """All served models; none until they are loaded."""
        return () if self.model is None else (self.model, *self.other_models)

    def of_pools(self, names: Collection[str]) -> "ClusterView":
        """The view without the pools, workers, links and adapters of others; itself if there are none."""
        if all(pool.name in names for pool in self.pools):
            return self
        workers = tuple(worker for worker in self.workers if worker.pool in names)
        pools = tuple(pool for pool in self.pools if pool.name in names)
        known, models = {worker.name for worker in workers}, {pool.model for pool in pools}
        return replace(
            self,
            workers=workers,
            links=tuple(link for link in self.links if link.owner in known and link.reader in known),
            unlinked=frozenset(pair for pair in self.unlinked if known.issuperset(pair)),
            pools=pools,
            adapters=tuple(adapter for adapter in self.adapters if adapter.model in models),
        )

    def ready(self, *roles: Role) -> tuple[WorkerView, ...]:
        return tuple(worker for worker in self.workers if worker.state is WorkerState.READY and worker.role in roles)

    def linked(self, owner: str, reader: str) -> bool:
        """Whether KV can move from owner to reader, as far as known."""
        return owner != reader and (owner, reader) not in self.unlinked


@dataclass(frozen=True, slots=True)
class Decision:
    """One scaling decision: a worker flips to a role, or a pool grows or shrinks by one worker (`worker`: that leaves).

    `reason` explains it, with the figures behind it.
    """

    kind: Literal["flip", "grow", "shrink"]
    reason: str
    worker: str = ""
    role: Role | None = None
    pool: str = ""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision of the elastic policy, `age_s` seconds old, and its outcome.

    `outcome`: "advised", "under way", "done", or "failed: " and why.
    """

    decision: Decision
    age_s: float
    outcome: str
