"""The configuration of one worker: small frozen types, composed. Read once at the edge; knows no file format."""

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from diptych.view import MAX_RANKS as MAX_RANKS
from diptych.view import PLACEMENTS as PLACEMENTS
from diptych.view import ParallelConfig as ParallelConfig
from kvtransfer.layout import QUANTIZED as QUANTIZED
from workers.costs import CostModel

SPAN = 128  # tokens: blocks are lent in multiples of this, the keys that the native attention merges at once
KEPT_SHARE = 0.25  # of its KV blocks that a worker does not lend
RESTORED_SHARE = 0.5  # of the free blocks: the most that hold what was restored from host memory for other workers

# How batching policies apply a TPOT SLO; routers predict steps with the same numbers.
ADAPTIVE_MARGIN = 0.97  # of the SLO that `adaptive` uses in a single step
MISSED_SLO_SLOWDOWN = 2.0  # largest step, relative to its decodes alone, where even the smallest chunk misses the SLO
BATCHING = ("chunked", "static", "orca", "prefill-first", "prefill-only", "adaptive")
CHOICES = {
    "batching": BATCHING,
    "prompt_order": ("fcfs", "deadline"),
    "dtype": ("auto", "float32", "bfloat16", "float16", *QUANTIZED),
    "weights": ("float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1", "q4_k", "gguf"),  # `model.load.FORMATS`
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes, limits and policies of one engine."""

    block_size: int = 16
    """Tokens per KV block. Larger: fewer and longer reads, but more waste at the end of each sequence. If all pools of
    a model with linear attention leave it out, as many as make a state no larger than a layer's KV.
    """
    kv_blocks: int = 512
    """Blocks of the KV pool, allocated once, on each rank for its layers and heads. Left out, or 0: chosen when the
    worker starts. On a GPU by `gpu_memory_utilization`; on a CPU by the host's free memory, divided among the
    cluster's ranks, and no more than `max_running` requests of the longest length use.
    """
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and, where `kv_blocks` is left out, KV blocks. Where Ray sets a
    part of a GPU aside (`resources.gpu` below 1), of that part.
    """
    batching: str = "chunked"
    """The batching policy, which fills steps: docs/batching.md."""
    max_batch_tokens: int = 512
    """Token budget of a step. Larger: prompts finish sooner, decodes beside them wait longer."""
    tpot_slo_s: float | None = None
    """Under `chunked` and `adaptive`, smaller chunks keep a step that has a decode below this time. Default: only
    requests' own SLOs do.
    """
    prompt_order: str = "fcfs"
    """Order of waiting prompts: first come, first served, or by priority and then by deadline, late ones last."""
    prompt_window: int = 16
    """Number of arrivals after the oldest that are reordered; bounds how often a prompt can be overtaken."""
    max_running: int = 32
    """Maximum number of running sequences."""
    max_waiting: int = 1024
    """Maximum number of waiting sequences; more are refused."""
    max_model_len: int | None = None
    """Longest sequence. Default: the model's context, as far as the KV pool holds it."""
    staging_blocks: int = 0
    """Blocks that may be reserved for prompts whose KV has not arrived. 0: half the pool."""
    prefix_caching: bool = True
    """Keep blocks of finished sequences for prompts with the same prefix."""
    dtype: str = "auto"
    """Of the KV: `float32`, `bfloat16`, `float16`, or quantized with a scale for each token and head: `int8`, or `fp8`
    (e4m3) with a larger error. On a GPU also of the weights, which are bfloat16 beside quantized KV. Smaller: less to
    move, rounded. `auto`: `float32` on a CPU; on a GPU `float16` for a model stored in it, else `bfloat16`.
    """
    weights: str = "float32"
    """Weight format of the linear layers on a CPU. All but `float32` are less exact, smaller and mostly faster."""
    device: str = "auto"
    """`auto`: a GPU for each rank if there are any, else the CPU; or `cpu`, `cuda:0` and so on."""
    cuda_graphs: bool = True
    """Decodes of a whole model on a GPU replay CUDA graphs; false: the host launches each kernel."""
    deterministic: bool = False
    """Bit-identical logits, whatever else is in the batch and however a prompt is chunked."""
    threads: int = 0
    """Compute threads. 0: as many as `resources.cpu`."""
    cores: str = ""
    """Cores for these: `auto` (cores that no other worker has), a list such as `0,2-3`, or empty for no pinning."""

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"engine.{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"engine.device {self.device!r} is not a device; write auto, cpu, cuda or cuda:0")
        for name in ("block_size", "max_batch_tokens", "max_running", "max_waiting", "prompt_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_running > self.max_batch_tokens:
            raise ValueError(
                f"engine.max_running ({self.max_running}) is above engine.max_batch_tokens ({self.max_batch_tokens}): "
                "a step could not advance every running sequence"
            )
        if self.kv_blocks < 0:
            raise ValueError(f"engine.kv_blocks is {self.kv_blocks}; it must be at least 1, or left out")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"engine.gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie above 0 and is at most 1"
            )
        if self.threads < 0:
            raise ValueError(f"engine.threads is {self.threads}; it must be 0 (the worker's CPUs) or more")
        if self.tpot_slo_s is not None and not self.tpot_slo_s > 0:
            raise ValueError(f"engine.tpot_slo_s is {self.tpot_slo_s}; it must be above 0 seconds")
        if self.staging_blocks < 0 or 0 < self.kv_blocks < self.staging_blocks:
            raise ValueError(f"engine.staging_blocks is {self.staging_blocks}; it must lie between 0 and kv_blocks")

    @property
    def can_lend(self) -> bool:
        """Whether its blocks can be lent: whole ones make up a span."""
        return SPAN % self.block_size == 0


class ByteSize(int):
    """A number of bytes, which a cluster file may also write as `8GiB`, `8Gi` or `500MB`."""

    @classmethod
    def parse(cls, value: object) -> "ByteSize":
        """Raises ValueError."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B?", str(value), re.IGNORECASE)
        if found is None or isinstance(value, bool):
            raise ValueError(f"{value!r} is no size; write 8GiB, 500MB or a number of bytes")
        number, unit, binary = found.groups()
        base = 1024 if binary else 1000
        return cls(float(number) * base ** (" KMGT".index(unit.upper())) if unit else float(number))


NO_BYTES = ByteSize()
DISK_SPEED = ByteSize(2_000_000_000)
ADAPTERS_SIZE = ByteSize(1 << 30)
REMOTE_SPEED = ByteSize(2_500_000_000)
REMOTE_SIZE = ByteSize(256_000_000_000)


@dataclass(frozen=True, slots=True)
class DiskCacheConfig:
    """A disk tier that stores the blocks of the host tier. It survives restarts, and the workers of a host share it."""

    path: str
    """Folder that the workers of a host share. Protect it like prompts: it contains KV."""
    size: ByteSize
    """Of each worker's files, all its ranks together, allocated at its start."""
    speed: ByteSize = DISK_SPEED
    """Bytes that a simulation reads, and that it writes, per second. A real worker measures its disk."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"disk.path {self.path!r} is read where the worker runs, so it must begin with /")
        if not self.size:
            raise ValueError("disk.size is 0; give the file room, such as 100GiB, or leave disk out")
        if not self.speed:
            raise ValueError("disk.speed is 0; write the bytes per second, such as 2GB")


@dataclass(frozen=True, slots=True)
class RemoteCacheConfig:
    """A Redis or Valkey server that stores the blocks of the host tier, shared by workers of all hosts."""

    url: str
    """`redis://HOST:PORT/DB`, or `rediss://` for TLS. It may contain a user name, but not a password."""
    password_file: str = ""
    """File with the server's password, on the worker's node. Empty: no password."""
    ca_file: str = ""
    """CA certificates for `rediss://`. Empty: the system's."""
    speed: ByteSize = REMOTE_SPEED
    """Bytes that a simulated server sends to all workers, and gets, per second. A real worker measures its server."""
    size: ByteSize = REMOTE_SIZE
    """Bytes of KV that a simulated server keeps. A real one has its own `maxmemory`."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError(f"remote.url {self.url!r} is no server; write redis://HOST:PORT/0, or rediss:// for TLS")
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError("remote.url has a password, which others would see; put it into a file: password_file")
        if self.ca_file and parts.scheme != "rediss":
            raise ValueError("remote.ca_file is for TLS; write rediss:// in remote.url, or leave it out")
        if not self.speed or not self.size:
            raise ValueError("remote.speed and remote.size are above 0; write bytes, such as 2500MB, or leave them out")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The tiers of a worker's prefix cache beyond device memory."""

    host: ByteSize | None = None
    """Host memory of each worker, all its ranks together, for prefixes that the device's cache evicts. 0: none. Left
    out: on a GPU an eighth of the host's free memory for each rank, at most as much as its KV pool; on a CPU none,
    since its KV pool is in the host's memory."""
    disk: DiskCacheConfig | None = None
    """Disk tier; requires `host`."""
    remote: RemoteCacheConfig | None = None
    """Remote tier; requires `host`. It is queried for blocks that the disk does not have."""
    pins: ByteSize = NO_BYTES
    """The part of `host` for prompts pinned by `diptych cache warm --pin`, at most half. 0: nothing can be pinned."""
    adapters: ByteSize = ADAPTERS_SIZE
    """Host memory of each worker, all its ranks together, for adapters, counted in float32. Evicted in LRU order;
    adapters of running requests stay.
    """

    def __post_init__(self) -> None:
        if self.disk is not None and not self.host:
            raise ValueError("disk needs host: blocks come and go through host memory; write host: 8GiB")
        if self.remote is not None and not self.host:
            raise ValueError("remote needs host: blocks come and go through host memory; write host: 8GiB")
        if 2 * self.pins > (host := self.host or 0):
            raise ValueError(f"pins ({self.pins} bytes) must be at most half of host ({host} bytes)")


BACKENDS = ("cuda_ipc", "nixl", "tcp", "memory", "simulated")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer between workers."""

    backends: tuple[str, ...] = ("cuda_ipc", "nixl", "tcp")
    """In order of preference; each pair of workers takes the first that passes its probe. `cuda_ipc` is for GPUs of one
    host, `memory` for one process and `simulated` for simulations.
    """
    digest: bool = True
    """Verify a digest of every block on arrival; a corrupt block is recomputed."""
    lease_s: float = 10.0
    """The owner frees a leased prompt this long after the last message from its reader."""
    read_timeout_s: float = 30.0
    """Time limit of one read."""
    quarantine_s: float = 60.0
    """A read still unsettled this long after its deadline restarts its backend."""
    max_readers: int = 256
    """Maximum number of concurrent readers of a worker: workers on its control connection, and ranks of theirs on each
    of its ranks over `tcp`. A larger cluster needs more, and about twice as many open files (`ulimit -n`).
    """
    staging_bytes: int = 64 << 20
    """Memory of each rank for KV that arrives in another dtype or block size. Unused where all pools have the same."""
    host: str = "auto"
    """Address for peers of a worker. `auto`: its node's address in Ray."""

    def __post_init__(self) -> None:
        for name in self.backends:
            if name not in BACKENDS:
                raise ValueError(f"transfer.backends: {name!r} is not one of {', '.join(BACKENDS)}")
        if not self.backends:
            raise ValueError("transfer.backends is empty; name at least one of " + ", ".join(BACKENDS))
        for name in ("lease_s", "read_timeout_s", "quarantine_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"transfer.{name} is {getattr(self, name)}; it must be above 0")
        if self.max_readers < 1:
            raise ValueError(f"transfer.max_readers is {self.max_readers}; it must be at least 1")
        if self.staging_bytes < 0:
            raise ValueError(f"transfer.staging_bytes is {self.staging_bytes}; it must be 0 (none) or more")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything one worker needs to start. `secret` is the cluster's: peers without it are refused.

    `prefix_tokens`: for a prompt that another worker computes, a cached prefix is used up to a multiple of this many
    tokens (the least common multiple of different block sizes). `staging_bytes`: memory of each rank for KV that
    arrives in another dtype or block size. `cost`: the engine's initial estimate of step times; None: a default with
    the right proportions. `memory_part`: share of its device that each rank may use if `engine.kv_blocks` is 0.
    """

    name: str
    pool: str
    model: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    executor: str = "torch"  # "torch" (a real model) or "simulated" (CostModel seconds, no compute)
    secret: str = ""
    cpus: int = 1
    prefix_tokens: int = 1
    staging_bytes: int = 0
    cost: CostModel | None = None
    memory_part: float = 1.0
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        if self.prefix_tokens < 1 or self.staging_bytes < 0:
            raise ValueError(
                f"{self.name}: prefix_tokens is {self.prefix_tokens}, it must be at least 1; staging_bytes is "
                f"{self.staging_bytes}, it must be 0 (none) or more"
            )
