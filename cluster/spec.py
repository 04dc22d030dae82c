"""The specification of a cluster: the types of a cluster file and of the chart's `cluster:` block.

Knows keys, defaults and bounds; knows no file (`cluster.spec_file`) and no runtime.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diptych.view import Role as Role
from workers.config import CacheConfig, EngineConfig, ParallelConfig, TransferConfig
from workers.costs import CostModel
from workers.request import SLO


class SpecError(ValueError):
    """The specification is invalid; the message says where, and what to write instead."""


ROUTING = (
    *("least-loaded", "random", "round-robin", "distserve"),
    *("splitwise", "mooncake", "mooncake-local", "slo"),
)
ADMISSION = ("none", "predictive", "slo")
TOOL_CALL_PARSERS = (
    *("auto", "none", "openai", "gemma4", "functiongemma", "deepseek_v3", "deepseek_v31", "mistral_args", "mistral"),
    *("glm45", "qwen3_coder", "hermes", "llama3_json", "pythonic"),
)
REASONING_PARSERS = ("auto", "none", "openai_gptoss", "gemma4", "mistral", "deepseek_r1", "qwen3", "glm45")
POOLINGS = ("auto", "none", "mean", "last")
ON_MISS = ("reject", "queue")
EXECUTORS = ("torch", "simulated")
MAX_REPLICAS = 1024

_LABEL = r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"([A-Za-z0-9]([-A-Za-z0-9.]{{0,251}}[A-Za-z0-9])?/)?{_LABEL}", re.ASCII)
_SELECTOR = re.compile(rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))", re.ASCII)


def _check(spec: object, names: Collection[str], is_valid: Callable[[float], bool], rule: str) -> None:
    """Raise ValueError for a field that has an invalid number; None is valid."""
    for name in names:
        value = getattr(spec, name)
        if value is not None and not is_valid(value):
            raise ValueError(f"{name} is {value}; it must be {rule}")


def _check_above_0(spec: object, *names: str, rule: str = "above 0") -> None:
    _check(spec, names, lambda value: value > 0, rule)


def _check_choice(spec: object, name: str, known: Collection[str]) -> None:
    """Raise ValueError for a field that is none of `known`; None is valid."""
    value = getattr(spec, name)
    if value is not None and value not in known:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Resources:
    """Ray resources of each rank of a worker."""

    cpu: float = 1
    """Ray CPUs. With `engine.threads` 0 also the number of compute threads, rounded down, at least 1."""
    gpu: float = 0
    """Ray GPUs."""
    custom: dict[str, float] = field(default_factory=dict)
    """Ray custom resources and the amount of each, such as `{prefill: 1}`."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes that may run ranks, such as `{ray.io/accelerator-type: H100}`, by Ray's selectors: `value`,
    `!value`, `in(one, other)` or `!in(one, other)`.
    """

    def __post_init__(self) -> None:
        if self.cpu < 0 or self.gpu < 0 or any(amount <= 0 for amount in self.custom.values()):
            raise ValueError("cpu and gpu must not be negative and custom amounts must be above 0")
        if not self.custom.keys().isdisjoint(("CPU", "GPU")):
            raise ValueError("custom must not name CPU or GPU; write cpu and gpu")
        for key, selector in self.labels.items():
            if not _LABEL_KEY.fullmatch(key):
                raise ValueError(f"labels: {key!r} is no label of a Ray node; write gpu or example.com/gpu")
            if not _SELECTOR.fullmatch(selector):
                right = "write h100, !h100, in(h100, h200) or !in(h100, h200)"
                raise ValueError(f"labels.{key}: {selector!r} selects no label; {right}")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A group of identical workers."""

    name: str
    """Lower-case letters, digits and dashes. Workers are named `NAME-0`, `NAME-1` and so on."""
    role: Role
    """The work that gateways send here. `mixed` runs both phases."""
    replicas: int = 1
    """Workers at the start. `{min: 1, max: 4}` starts with the minimum and lets the pool scale between the two; a plain
    number changes only by `diptych scale`.
    """
    model: str | None = None
    """Default: the cluster's. Pools of several models share gateways, which route by a request's `model`."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The ranks of a worker."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Sizes, limits and policies of each worker."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """The tiers of each worker's prefix cache behind its device: docs/kv.md."""
    resources: Resources = field(default_factory=Resources)
    """What Ray reserves for each rank."""
    cost: CostModel | None = None
    """Step times, for engines, routers and simulations; `diptych profile` measures them. Default: engines learn them
    from their own steps, routers use rough estimates.
    """
    hardware: str = ""
    """Name of the GPU, for plans and simulations. Placement uses `resources`."""
    min_replicas: int | None = None
    """What `replicas: {min: ...}` means; write that."""
    max_replicas: int | None = None
    """What `replicas: {max: ...}` means; write that."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", self.name):
            raise ValueError(f"name {self.name!r} must be lower-case letters, digits and dashes, at most 42")
        if not 0 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas is {self.replicas}; it must lie between 0 and {MAX_REPLICAS}")
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError("min_replicas and max_replicas come together; write replicas: {min: 1, max: 4}")
        if self.cache.host and not self.engine.prefix_caching:
            raise ValueError("cache keeps what the prefix cache evicts, but engine.prefix_caching is off")
        least, most = self.bounds
        if not 0 <= least <= self.replicas <= most <= MAX_REPLICAS:
            raise ValueError(
                f"replicas is {self.replicas}, min {least} and max {most}; it must be 0 <= min <= replicas <= max <= "
                f"{MAX_REPLICAS}"
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of workers for autoscaling; both are `replicas` if the pool does not scale."""
        if self.min_replicas is None or self.max_replicas is None:
            return self.replicas, self.replicas
        return self.min_replicas, self.max_replicas

    @property
    def num_ranks(self) -> int:
        """Ranks at the start."""
        return self.replicas * self.parallel.world_size

    @property
    def max_ranks(self) -> int:
        """Ranks when it has grown to its maximum."""
        return self.bounds[1] * self.parallel.world_size


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """The SLO and the queueing of a class. A request's own SLO overrides the class's."""

    ttft_s: float | None = None
    """TTFT SLO."""
    tpot_s: float | None = None
    """TPOT SLO: mean time per token after the first."""
    priority: int = 0
    """Lower is served first."""
    max_queued: int = 256
    """Requests of the class that may wait in a gateway; more are refused."""
    max_wait_s: float | None = None
    """A request that has waited this long goes before all others. Default: 60, or `ttft_s` where that is more."""
    on_miss: str | None = None
    """What happens to a request whose SLO cannot be met. Default: `reject`, or `queue` in a class without an SLO."""

    def __post_init__(self) -> None:
        seconds = ("ttft_s", "tpot_s", "max_wait_s")
        _check(self, seconds, lambda value: 0 < value < math.inf, "above 0 seconds, or left out")
        _check(self, ["max_queued"], lambda value: value >= 0, "0 (no queue) or more")
        if self.ttft_s is not None and self.max_wait_s is not None and self.ttft_s > self.max_wait_s:
            late = "a request would count as starving while its SLO can still be met"
            raise ValueError(f"ttft_s ({self.ttft_s}) is above max_wait_s ({self.max_wait_s}): {late}")
        _check_choice(self, "on_miss", ON_MISS)
        if self.on_miss == "reject" and self.ttft_s is None and self.tpot_s is None:
            raise ValueError("on_miss is reject, but the class has neither ttft_s nor tpot_s that could be missed")

    @property
    def patience_s(self) -> float:
        """The wait after which a request goes before all others."""
        return self.max_wait_s if self.max_wait_s is not None else max(60.0, self.ttft_s or 0.0)


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The gateways: limits, routing, admission, SLOs and servers."""

    replicas: int = 1
    """Number of gateways. Limits and shares apply to each one separately."""
    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0` opens it to the network: see docs/security.md."""
    grpc_port: int = 50051
    """Port of the gRPC API. 0: any free port. The second gateway uses the next port."""
    max_requests: int = 256
    """Requests in flight in a gateway; more are refused."""
    max_prompt_bytes: int = 8 << 20
    """A larger prompt is refused before it is tokenized."""
    default_max_tokens: int = 512
    """Default `max_tokens` of a request, as far as the context has room."""
    placement_timeout_s: float = 60.0
    """How long an attempt may wait for a worker, and then for a reservation. Shorter: refusals come sooner under full
    load.
    """
    max_attempts: int = 6
    """Attempts at a request, including the first, before it fails."""
    routing: str = "least-loaded"
    """The router, which chooses workers: docs/routing.md."""
    admission: str = "none"
    """Admission control: refuses or queues requests whose SLO cannot be met. See docs/routing.md."""
    rebalance: bool = False
    """Migrate decodes after role changes, and requeue waiting prompts on better workers. Draining workers are always
    emptied.
    """
    cache_events_interval_s: float = 0.25
    """Shortest interval between two updates of a worker's prefix index, for routers that use it."""
    slo: SLO = field(default_factory=SLO)
    """SLO of requests without one of their own and without a class."""
    classes: dict[str, ClassSpec] = field(default_factory=dict)
    """Classes of requests by name. If there are any, requests of other classes are refused."""
    tenants: dict[str, float] = field(default_factory=dict)
    """Shares of capacity, which sum to 1. `*` is shared by all tenants not named; without it they are refused."""
    share_prefixes: bool = False
    """Share cached prefixes between tenants. Saves work for prompts with common prefixes, but `cached_tokens` and
    timing reveal to a tenant what others asked. Off: each tenant uses only its own prefixes.
    """
    max_queued: int = 1024
    """Requests that may wait in a gateway's admission queue. 0: no queue."""
    http_port: int | None = None
    """Port of the HTTP API: docs/http.md. 0: any free port; default: no HTTP. The second gateway uses the next port."""
    http_allowed_origins: tuple[str, ...] = ()
    """Origins whose scripts may call the HTTP API (CORS), such as `https://chat.example.com`; `*`: any."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls, by vLLM's names: docs/http.md. `auto`: as its chat template shows; `none`: calls
    are text, and tools are refused.
    """
    reasoning_parser: str = "auto"
    """How the model marks its reasoning. `none`: it is part of the content."""
    pooling: str = "auto"
    """How `/v1/embeddings` makes one vector of a prompt's hidden states: their `mean`, or that of the `last` token.
    `auto`: as the model's folder says (Sentence Transformers' `1_Pooling`), else embeddings are refused; `none`: they
    are.
    """
    trace_requests: int = 4096
    """Finished requests that a gateway keeps for `diptych trace`. 0: none."""
    trace_s: float = 14_400.0
    """How long it keeps them at most: hours, since `diptych plan --from-cluster` replays them."""
    tls_cert_file: str | None = None
    """PEM file with the gateway's certificate and its chain: turns on TLS for gRPC and HTTP, docs/security.md. Files
    are read where the gateway runs, and again when they change.
    """
    tls_key_file: str | None = None
    """PEM file with the certificate's key, without a password."""
    tls_client_ca_file: str | None = None
    """PEM file with authorities: clients need a certificate signed by one of them."""
    api_keys_file: str | None = None
    """File with API keys, one per line, each optionally followed by its tenant. Requests must carry one."""

    def __post_init__(self) -> None:
        _check_choice(self, "routing", ROUTING)
        _check_choice(self, "admission", ADMISSION)
        _check_choice(self, "tool_call_parser", TOOL_CALL_PARSERS)
        _check_choice(self, "reasoning_parser", REASONING_PARSERS)
        _check_choice(self, "pooling", POOLINGS)
        for name in ("ttft_s", "tpot_s"):
            seconds = getattr(self.slo, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"slo.{name} is {seconds}; it must be above 0 seconds")
        _check(self, ["grpc_port", "http_port"], lambda port: 0 <= port <= 65535, "between 0 (any free port) and 65535")
        if self.http_port and self.grpc_port and abs(self.http_port - self.grpc_port) < self.replicas:
            raise ValueError(
                f"http_port ({self.http_port}) and grpc_port ({self.grpc_port}) are the same for a gateway"
            )
        counts = ("replicas", "max_requests", "max_prompt_bytes", "default_max_tokens", "max_attempts")
        _check(self, counts, lambda value: value >= 1, "at least 1")
        _check(self, ["max_queued", "trace_requests"], lambda value: value >= 0, "0 (none) or more")
        _check_above_0(self, "trace_s", "cache_events_interval_s", "placement_timeout_s")
        for tenant, share in self.tenants.items():
            if not 0 < share <= 1:
                raise ValueError(f"tenants.{tenant} is {share}; a share lies above 0 and is at most 1")
        if self.tenants and not math.isclose(total := math.fsum(self.tenants.values()), 1.0, abs_tol=1e-6):
            raise ValueError(f"tenants: the shares sum to {total:g}; they must sum to 1")
        for origin in self.http_allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(f"http_allowed_origins: {origin!r} is no origin; write https://chat.example.com, or *")
        self._check_access()

    @property
    def names_files(self) -> bool:
        """Whether it names certificate or key files."""
        return self.tls_cert_file is not None or self.api_keys_file is not None

    @property
    def grpc_scheme(self) -> str:
        """The scheme of the address that clients use."""
        return "grpc" if self.tls_cert_file is None else "grpcs"

    def _check_access(self) -> None:
        for name in ("tls_cert_file", "tls_key_file", "tls_client_ca_file", "api_keys_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_absolute():
                raise ValueError(f"{name} {path!r} is read where the gateway runs, so it must begin with /")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            missing = "tls_key_file" if self.tls_key_file is None else "tls_cert_file"
            raise ValueError(f"tls_cert_file and tls_key_file come together; give {missing} too")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            needs = "a client shows its certificate to a server with one"
            raise ValueError(f"tls_client_ca_file: {needs}; give tls_cert_file and tls_key_file too")


@dataclass(frozen=True, slots=True)
class HealthSpec:
    """Failure detection, and time limits for starting and stopping workers."""

    heartbeat_s: float = 0.25
    """Longest interval between two messages of a worker. Shorter: failures are detected sooner, with more calls."""
    dead_after_s: float = 2.0
    """A worker that sends nothing for this long is replaced. Too short: live workers on a slow machine are replaced."""
    start_timeout_s: float = 300.0
    """How long a worker may take to load before it is restarted."""
    place_timeout_s: float = 30.0
    """How long a worker may wait for nodes with room. Raise it where an autoscaler must add them."""
    drain_s: float = 60.0
    """How long a draining worker may continue its requests; the rest is then recomputed elsewhere."""

    def __post_init__(self) -> None:
        _check_above_0(self, "start_timeout_s", "place_timeout_s", "drain_s")
        if not 0 < self.heartbeat_s < self.dead_after_s:
            raise ValueError(
                f"heartbeat_s ({self.heartbeat_s}) must be above 0 and below dead_after_s ({self.dead_after_s})"
            )


ELASTIC = ("off", "advise", "act")


@dataclass(frozen=True, slots=True)
class ElasticSpec:
    """Roles and replica counts follow the load (see `cluster.policy.scaling.elastic`)."""

    mode: str = "off"
    """`advise` logs each change, `act` applies it. Default: `act` in a file where a pool has `replicas: {min, max}`,
    else `off`.
    """
    period_s: float = 1.0
    """Interval between two decisions."""
    window_s: float = 30.0
    """Seconds of load that a decision is based on. Longer: steadier, but slower to react."""
    dwell_s: float = 3.0
    """How long the prediction must hold before the change is made."""
    cooldown_s: float = 10.0
    """Shortest time between two changes."""
    floors: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    """Minimum number of workers per role; mixed workers count in both."""

    def __post_init__(self) -> None:
        _check_choice(self, "mode", ELASTIC)
        _check_above_0(self, "period_s", "window_s", rule="above 0 seconds")
        _check(self, ("dwell_s", "cooldown_s"), lambda value: value >= 0, "0 or more")
        for role, floor in self.floors.items():
            if role not in ("prefill", "decode") or floor < 0:
                raise ValueError(f"floors.{role} is {floor}; floors are numbers of workers of prefill and decode")


COMPAT = ("vllm",)


@dataclass(frozen=True, slots=True)
class MetricsSpec:
    """Additional series of `/metrics`."""

    compat: str | None = None
    """Adds series under another system's names: docs/reference/metrics.md."""

    def __post_init__(self) -> None:
        _check_choice(self, "compat", COMPAT)


OTLP_PROTOCOLS = ("grpc", "http/protobuf")


@dataclass(frozen=True, slots=True)
class TracingSpec:
    """OpenTelemetry spans of requests (see `cluster.observe.otlp`)."""

    otlp_endpoint: str | None = None
    """Endpoint for spans, such as `http://collector:4317`; `https` uses TLS. Default: no spans are sent. Headers and
    certificates are environment variables: docs/observing.md.
    """
    otlp_protocol: str = "grpc"
    """Or `http/protobuf`, whose usual port is 4318."""
    sample_ratio: float = 1.0
    """Share of requests that have spans. A request's `traceparent` overrides it."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_endpoint):
            right = "write http://HOST:PORT, or https:// for TLS"
            raise ValueError(f"otlp_endpoint {self.otlp_endpoint!r} is no address of a collector; {right}")
        _check_choice(self, "otlp_protocol", OTLP_PROTOCOLS)
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio is {self.sample_ratio}; it must lie between 0 and 1")


LOG_FORMATS, LOG_LEVELS = ("text", "json"), ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogSpec:
    """How every process of the cluster logs (see `cluster.runtime.logs`)."""

    format: str = "text"
    """`json` is one object per line: docs/observing.md."""
    level: str = "info"
    """Lines below this level are not written."""

    def __post_init__(self) -> None:
        _check_choice(self, "format", LOG_FORMATS)
        _check_choice(self, "level", LOG_LEVELS)


def adapter_name_problem(name: str, model: str) -> str:
    """What is wrong with an adapter's name; empty: nothing."""
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9._/]{0,127}", name):
        return "must be letters, digits and any of - . _ /, at most 128, and begin with a letter or digit"
    return "is that of the model" if name == model else ""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Models served by pools of workers behind gateways."""

    model: str
    """A short name, a GGUF file, a folder or a hub id: the model of each pool that names no other."""
    pools: tuple[PoolSpec, ...]
    """For each model at least one mixed pool, or one prefill pool and one decode pool."""
    name: str = "diptych"
    """Names the cluster and its actors. Lower-case letters, digits and dashes."""
    transfer: TransferConfig = field(default_factory=TransferConfig)
    """KV transfer between workers."""
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
    """The gateways: limits, routing, admission, SLOs and servers."""
    health: HealthSpec = field(default_factory=HealthSpec)
    """Failure detection and time limits of workers."""
    executor: str = "torch"
    """`simulated` computes nothing and takes the time of `cost`, to test everything else."""
    elastic: ElasticSpec = field(default_factory=ElasticSpec)
    """Elastic roles and replica counts."""
    metrics: MetricsSpec = field(default_factory=MetricsSpec)
    """Additional series of `/metrics`."""
    logs: LogSpec = field(default_factory=LogSpec)
    """Logging of all processes."""
    tracing: TracingSpec = field(default_factory=TracingSpec)
    """OpenTelemetry spans of requests."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters of `model` by the names that requests give: PEFT folders, at the same path on every node."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", self.name):
            raise ValueError(f"name {self.name!r} must be lower-case letters, digits and dashes, at most 42")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: names must differ, got {', '.join(names)}")
        _check_choice(self, "executor", EXECUTORS)
        if not self.pools:
            raise ValueError("pools is empty; name one mixed pool, or a prefill and a decode pool")
        if self.model not in self.models:
            others = ", ".join(self.models)
            raise ValueError(f"model is {self.model}, but all pools serve {others}; write one of these as the model")
        for name in self.adapters:
            if problem := next(filter(None, (adapter_name_problem(name, model) for model in self.models)), ""):
                raise ValueError(f"adapters.{name}: the name {problem}")
        if self.adapters and self.executor == "simulated":
            raise ValueError("adapters: executor simulated has no weights to adapt; leave them out")
        for model in self.models:
            self._check_pools(self.pools_of(model), f" of {model}" if len(self.models) > 1 else "")

    def _check_pools(self, pools: Sequence[PoolSpec], of_model: str) -> None:
        """Raise ValueError if the pools of one model cannot serve it. `of_model`: for the message."""
        roles = {pool.role for pool in pools}
        if Role.MIXED not in roles and roles != {Role.PREFILL, Role.DECODE}:
            missing = ({Role.PREFILL, Role.DECODE} - roles).pop().value
            raise ValueError(
                f"pools: there is no {missing} pool{of_model} (and no mixed one), so no request could finish"
            )
        workers = sum(pool.replicas for pool in pools)
        if not workers:
            raise ValueError(f"pools: there is no worker{of_model} in any of them; give one at least 1 replica")
        for role, floor in self.elastic.floors.items():  # a mixed worker counts in both
            if self.elastic.mode != "off" and floor > workers:
                raise ValueError(
                    f"elastic.floors.{role} is {floor}, the pools{of_model} have {workers} workers; lower the floor"
                )

    @property
    def models(self) -> tuple[str, ...]:
        """The served models, in the order of their pools."""
        return tuple(dict.fromkeys(pool.model or self.model for pool in self.pools))

    @property
    def loads_models(self) -> bool:
        """Whether its workers have weights."""
        return self.executor != "simulated"

    def pools_of(self, model: str) -> tuple[PoolSpec, ...]:
        return tuple(pool for pool in self.pools if (pool.model or self.model) == model)

    def of_model(self, model: str) -> "ClusterSpec":
        """The part of the cluster that serves this model. Its workers exchange no KV with those of others."""
        if self.models == (model,):
            return self
        adapters = self.adapters if model == self.model else {}
        return replace(self, model=model, pools=self.pools_of(model), adapters=adapters)

    def check_one_model(self, what: str) -> None:
        """Raises `SpecError` for several models. `what`: needs one."""
        if len(self.models) > 1:
            names = ", ".join(self.models)
            raise SpecError(f"pools: they serve several models ({names}), and {what} takes one; write a file for each")

    def with_model(self, model: str) -> "ClusterSpec":
        return replace(self, model=model, pools=tuple(replace(pool, model=None) for pool in self.pools))
