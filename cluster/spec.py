"""The cluster as its operator describes it: YAML, the chart's `cluster:` block and these types are one shape.

Knows keys, defaults and bounds; knows no runtime. A wrong key or value is one `SpecError` that names the path and the
nearest right key.
"""

import difflib
import math
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from workers.config import EngineConfig, ParallelConfig, TransferConfig
from workers.costs import CostModel, LinearCost
from workers.request import SLO


class SpecError(ValueError):
    """The specification cannot be used; the message says where and what to write instead."""


ROUTING = (
    *("least-loaded", "random", "round-robin", "power-of-two", "product"),
    *("distserve", "splitwise", "tetri", "mooncake", "mooncake-local", "promise"),
)
ADMISSION = ("none", "late", "early", "predictive", "promise")
ON_MISS = ("reject", "queue")
MOST_REPLICAS = 1024


class Role(Enum):
    """What a pool is for. Workers themselves can do all three."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


_LABEL = r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"([A-Za-z0-9]([-A-Za-z0-9.]{{0,251}}[A-Za-z0-9])?/)?{_LABEL}", re.ASCII)
_SELECTOR = re.compile(rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Resources:
    """What Ray must set aside for each rank of a worker. `custom` are Ray custom resources, such as {prefill: 1}.

    `labels` are those of the nodes where ranks may lie, such as {ray.io/accelerator-type: H100}, by Ray's selectors:
    `value`, `!value`, `in(one, other)` or `!in(one, other)`.
    """

    cpu: float = 1
    gpu: float = 0
    custom: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

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
    """A group of equal workers. `cost` is what steps cost there, for engines and routers; None: they guess.

    It starts with `replicas` workers. In YAML `replicas: {min: 1, max: 4}` starts with the least and lets the pool grow
    and shrink between the two; a plain number is changed by hand only. `hardware` names the GPU (`workers.profiles`),
    for plans and simulations; placement goes by `resources`.
    """

    name: str
    role: Role
    replicas: int = 1
    model: str | None = None  # None: the cluster's
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    resources: Resources = field(default_factory=Resources)
    cost: CostModel | None = None
    hardware: str = ""
    min_replicas: int | None = None
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", self.name):
            raise ValueError(f"name {self.name!r} must be lower-case letters, digits and dashes, at most 42")
        if not 0 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"replicas is {self.replicas}; it must lie between 0 and {MOST_REPLICAS}")
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError("min_replicas and max_replicas come together; write replicas: {min: 1, max: 4}")
        least, most = self.bounds
        if not 0 <= least <= self.replicas <= most <= MOST_REPLICAS:
            raise ValueError(
                f"replicas is {self.replicas}, min {least} and max {most}; it must be 0 <= min <= replicas <= max <= "
                f"{MOST_REPLICAS}"
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """How few and how many workers it may have without anybody's word; the same number twice: it stays as it is."""
        if self.min_replicas is None or self.max_replicas is None:
            return self.replicas, self.replicas
        return self.min_replicas, self.max_replicas

    @property
    def num_ranks(self) -> int:
        """Processes that compute, in as many replicas as it starts with."""
        return self.replicas * self.parallel.world_size

    @property
    def most_ranks(self) -> int:
        """The same, when it has grown as far as it may."""
        return self.bounds[1] * self.parallel.world_size


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """What requests of a class are promised, and how they wait. Requests with times of their own keep these.

    Lower `priority` is served first. At most `max_queued` of the class wait in a gateway; one that has waited for
    `max_wait_s` (None: a minute, or its TTFT where that is more) goes before all others. `on_miss`: what becomes of a
    request whose promise cannot be kept; None: "reject", or "queue" in a class without promises.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0
    max_queued: int = 256
    max_wait_s: float | None = None
    on_miss: str | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "max_wait_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"{name} is {seconds}; it must be above 0 seconds, or left out")
        if self.max_queued < 0:
            raise ValueError(f"max_queued is {self.max_queued}; it must be 0 (nobody waits) or more")
        if self.ttft_s is not None and self.max_wait_s is not None and self.ttft_s > self.max_wait_s:
            late = "a request would be taken for a starving one while its promise can still be kept"
            raise ValueError(f"ttft_s ({self.ttft_s}) is above max_wait_s ({self.max_wait_s}): {late}")
        if self.on_miss is not None and self.on_miss not in ON_MISS:
            raise ValueError(f"on_miss {self.on_miss!r} is not one of {', '.join(ON_MISS)}")
        if self.on_miss == "reject" and not self.promises:
            raise ValueError("on_miss is reject, but the class has neither ttft_s nor tpot_s that could be missed")

    @property
    def promises(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    @property
    def patience_s(self) -> float:
        """After so long a wait it goes first."""
        return self.max_wait_s if self.max_wait_s is not None else max(60.0, self.ttft_s or 0.0)


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The doors. `max_requests` bounds the requests in flight in one gateway; one more is refused.

    `routing` names what chooses workers, `admission` what turns requests away whose promise could not be kept (see
    `cluster.policy`). `slo` is the promise for requests that ask for none and are of no class. `classes` by name; with
    any, others are refused. `tenants` are shares of what is scarce, which sum to 1; "*" is shared by all who are not
    named, and without it they are refused. At most `max_queued` requests wait for their turn in one gateway.

    `http_port` opens the HTTP door, too (docs/http.md); None: there is none. The second gateway has the next ports.
    For `diptych trace` a gateway remembers the last `trace_requests` requests (0: none), for `trace_s`.
    """

    replicas: int = 1
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    max_requests: int = 256
    max_prompt_bytes: int = 8 << 20
    default_max_tokens: int = 512
    placement_timeout_s: float = 60.0  # how long a request may wait for a worker or a reservation
    max_attempts: int = 6
    routing: str = "least-loaded"
    admission: str = "none"
    rebalance: bool = False  # work leaves workers that break promises or change roles; draining ones it always leaves
    cache_news_s: float = 0.25  # how often, at most, a worker is asked what it has cached, by routers that use it
    slo: SLO = field(default_factory=SLO)
    classes: dict[str, ClassSpec] = field(default_factory=dict)
    tenants: dict[str, float] = field(default_factory=dict)
    max_queued: int = 1024
    http_port: int | None = None
    trace_requests: int = 4096
    trace_s: float = 600.0

    def __post_init__(self) -> None:
        for name, known in (("routing", ROUTING), ("admission", ADMISSION)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        for name in ("ttft_s", "tpot_s"):
            seconds = getattr(self.slo, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"slo.{name} is {seconds}; it must be above 0 seconds")
        if not 0 <= self.grpc_port <= 65535:
            raise ValueError(f"grpc_port is {self.grpc_port}; it must lie between 0 (any free port) and 65535")
        if self.http_port is not None and not 0 <= self.http_port <= 65535:
            raise ValueError(f"http_port is {self.http_port}; it must lie between 0 (any free port) and 65535")
        if self.http_port and self.grpc_port and abs(self.http_port - self.grpc_port) < self.replicas:
            raise ValueError(
                f"http_port ({self.http_port}) and grpc_port ({self.grpc_port}) are the same for a gateway"
            )
        for name in ("replicas", "max_requests", "max_prompt_bytes", "default_max_tokens", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_queued < 0:
            raise ValueError(f"max_queued is {self.max_queued}; it must be 0 (nobody waits) or more")
        if self.trace_requests < 0:
            raise ValueError(f"trace_requests is {self.trace_requests}; it must be 0 (none is remembered) or more")
        if not self.trace_s > 0:
            raise ValueError(f"trace_s is {self.trace_s}; it must be above 0")
        for tenant, share in self.tenants.items():
            if not 0 < share <= 1:
                raise ValueError(f"tenants.{tenant} is {share}; a share lies above 0 and is at most 1")
        if self.tenants and not math.isclose(total := math.fsum(self.tenants.values()), 1.0, abs_tol=1e-6):
            raise ValueError(f"tenants: the shares sum to {total:g}; they must sum to 1")
        if not self.cache_news_s > 0:
            raise ValueError(f"cache_news_s is {self.cache_news_s}; it must be above 0")
        if not self.placement_timeout_s > 0:
            raise ValueError(f"placement_timeout_s is {self.placement_timeout_s}; it must be above 0")


@dataclass(frozen=True, slots=True)
class HealthSpec:
    """A worker speaks at least every `heartbeat_s`; one that is silent for `dead_after_s` is given up and replaced.

    `place_timeout_s` is how long a worker may wait for nodes with room: raise it where an autoscaler must add them.
    `drain_s` is how long a worker that is taken out may go on with what it has.
    """

    heartbeat_s: float = 0.25
    dead_after_s: float = 2.0
    start_timeout_s: float = 300.0
    place_timeout_s: float = 30.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "place_timeout_s", "drain_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.heartbeat_s < self.dead_after_s:
            raise ValueError(
                f"heartbeat_s ({self.heartbeat_s}) must be above 0 and below dead_after_s ({self.dead_after_s})"
            )


ELASTIC = ("off", "advise", "act")


@dataclass(frozen=True, slots=True)
class ElasticSpec:
    """Workers change their roles as the load does (see `cluster.policy.elastic`). "advise" only logs what it would do.

    Every `period_s` the roles are judged on the load of the last `window_s`. A change must promise an improvement of
    `margin` (a share) for `dwell_s` on end, and comes `cooldown_s` after the last one at the earliest. `floors`: no
    fewer workers of a role, mixed ones counted in both.

    `replan`: once the load's shape has moved far for good, the planner is asked what the roles should be, at most every
    `replan_after_s`. "advise" only logs the answer, "act" has the steps lead there (see `cluster.replanning`).
    """

    mode: str = "off"
    period_s: float = 1.0
    window_s: float = 30.0
    margin: float = 0.1
    dwell_s: float = 3.0
    cooldown_s: float = 10.0
    floors: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    replan: str = "off"
    replan_after_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("mode", "replan"):
            if getattr(self, name) not in ELASTIC:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(ELASTIC)}")
        if ELASTIC.index(self.replan) > ELASTIC.index(self.mode):
            raise ValueError(f"replan is {self.replan} and mode {self.mode}, which allows less; raise mode")
        if self.replan != "off" and self.replan_after_s < self.window_s:
            raise ValueError(f"replan_after_s is {self.replan_after_s}; it must be at least window_s ({self.window_s})")
        for name in ("period_s", "window_s", "replan_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 seconds")
        for name in ("margin", "dwell_s", "cooldown_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        for role, floor in self.floors.items():
            if role not in ("prefill", "decode") or floor < 0:
                raise ValueError(f"floors.{role} is {floor}; floors are numbers of workers of prefill and decode")


COMPAT = ("vllm",)


@dataclass(frozen=True, slots=True)
class MetricsSpec:
    """What `/metrics` tells beside our own series: with `compat` "vllm" also those of vLLM, by its names."""

    compat: str | None = None

    def __post_init__(self) -> None:
        if self.compat is not None and self.compat not in COMPAT:
            raise ValueError(f"compat {self.compat!r} is not one of {', '.join(COMPAT)}")


LOG_FORMATS, LOG_LEVELS = ("text", "json"), ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogSpec:
    """How every process of the cluster logs (see `cluster.logs`)."""

    format: str = "text"
    level: str = "info"

    def __post_init__(self) -> None:
        for name, known in (("format", LOG_FORMATS), ("level", LOG_LEVELS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """One model served by pools of workers behind gateways."""

    model: str
    pools: tuple[PoolSpec, ...]
    name: str = "diptych"
    transfer: TransferConfig = field(default_factory=TransferConfig)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
    health: HealthSpec = field(default_factory=HealthSpec)
    executor: str = "torch"
    elastic: ElasticSpec = field(default_factory=ElasticSpec)
    metrics: MetricsSpec = field(default_factory=MetricsSpec)
    logs: LogSpec = field(default_factory=LogSpec)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", self.name):
            raise ValueError(f"name {self.name!r} must be lower-case letters, digits and dashes, at most 42")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: names must differ, got {', '.join(names)}")
        if self.executor not in ("torch", "modelled"):
            raise ValueError(f"executor {self.executor!r} is neither torch nor modelled")
        roles = {pool.role for pool in self.pools}
        if not roles:
            raise ValueError("pools is empty; name one mixed pool, or a prefill and a decode pool")
        if Role.MIXED not in roles and roles != {Role.PREFILL, Role.DECODE}:
            missing = ({Role.PREFILL, Role.DECODE} - roles).pop().value
            raise ValueError(f"pools: there is no {missing} pool (and no mixed one), so no request could finish")
        if not any(pool.replicas for pool in self.pools):
            raise ValueError("pools: there is no worker in any of them; give one at least 1 replica")
        models = {pool.model or self.model for pool in self.pools}
        if len(models) > 1:
            raise ValueError(f"pools: all must serve one model, got {', '.join(sorted(models))}")
        workers = sum(pool.replicas for pool in self.pools)
        for role, floor in self.elastic.floors.items():  # a mixed worker counts in both
            if self.elastic.mode != "off" and floor > workers:
                raise ValueError(f"elastic.floors.{role} is {floor}, the pools have {workers} workers; lower the floor")

    def with_model(self, model: str) -> "ClusterSpec":
        return replace(self, model=model, pools=tuple(replace(pool, model=None) for pool in self.pools))


def laptop_spec() -> ClusterSpec:
    """One prefill and one decode worker on this machine; the same as examples/laptop.yaml."""
    small = EngineConfig(kv_blocks=384, max_batch_tokens=256)
    return ClusterSpec(
        name="laptop",
        model="smollm2-135m",
        pools=(
            PoolSpec("prefill", Role.PREFILL, engine=small),
            PoolSpec("decode", Role.DECODE, engine=replace(small, kv_blocks=768)),
        ),
    )


def load_spec(path: str | Path) -> ClusterSpec:
    """Read a YAML file. Raises `SpecError`."""
    import yaml

    try:
        text = Path(path).read_text()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give the path of a cluster YAML file") from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    try:
        return parse_spec(document)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def parse_spec(document: object) -> ClusterSpec:
    """Build the spec from plain dicts, lists and scalars. Raises `SpecError`."""
    if not isinstance(document, dict):
        raise SpecError("is empty or not a mapping; it must at least have model and pools")
    _refuse_unknown_keys(document, ClusterSpec, "")
    pools = document.get("pools")
    if isinstance(pools, list):
        document = document | {"pools": [_bounded(pool, f"pools[{index}]") for index, pool in enumerate(pools)]}
    elastic = document.get("elastic")
    if isinstance(elastic, dict):
        bare = {key: "off" for key in ("mode", "replan") if elastic.get(key) is False}  # as YAML reads a bare off
        document = document | {"elastic": elastic | bare}
    spec: ClusterSpec = _convert(document, ClusterSpec, "")
    return spec


def _convert(value: object, kind: Any, path: str) -> Any:
    import msgspec

    try:
        return msgspec.convert(value, kind, dec_hook=_custom)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {_readable(str(error))}" if path else _readable(str(error))) from None


def _bounded(pool: object, path: str) -> object:
    """A pool with `replicas: {min, max}` as the fields that it means. Raises `SpecError`."""
    if not isinstance(pool, dict) or not isinstance(replicas := pool.get("replicas"), dict):
        return pool
    right = "write replicas: {min: 1, max: 4}, or a number"
    for key in ("min_replicas", "max_replicas"):
        if key in pool:
            raise SpecError(f"{path}.{key}: replicas has bounds already; {right}")
    for key, value in replicas.items():
        if key not in ("min", "max"):
            raise SpecError(f"{path}.replicas.{key}: unknown key; {right}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"{path}.replicas.{key}: Expected int, got {type(value).__name__}; {right}")
    if len(replicas) < 2:
        raise SpecError(f"{path}.replicas: has only {', '.join(map(str, replicas)) or 'nothing'}; {right}")
    least, most = replicas["min"], replicas["max"]
    return pool | {"replicas": least, "min_replicas": least, "max_replicas": most}


def _refuse_unknown_keys(value: object, expected: Any, path: str) -> None:
    """Walk value and type together; msgspec would ignore a misspelt key, we name it and its nearest neighbour."""
    options = [option for option in get_args(expected) if is_dataclass(option)]
    if isinstance(value, list) and options:
        for index, item in enumerate(value):
            _refuse_unknown_keys(item, options[0], f"{path}[{index}]")
        return
    if get_origin(expected) is dict and isinstance(value, dict) and options:
        for key, item in value.items():
            _refuse_unknown_keys(item, options[0], f"{path}.{key}")
            _convert(item, options[0], f"{path}.{key}")  # msgspec does not say which key of a mapping it means
        return
    if CostModel in get_args(expected):
        options = [LinearCost]
    kind = options[0] if options else expected
    if not (is_dataclass(kind) and isinstance(value, dict)):
        return
    hints = get_type_hints(kind)
    known = [each.name for each in fields(kind)]
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
            raise SpecError(f"{where}: unknown key; {hint}")
        _refuse_unknown_keys(item, hints[key], where)


def _custom(kind: type, value: object) -> object:
    """The one cost model that has a form in YAML."""
    import msgspec

    if kind is not CostModel:
        raise NotImplementedError(f"{kind} cannot be read")
    try:
        return msgspec.convert(value, LinearCost)
    except msgspec.ValidationError as error:
        raise ValueError(_readable(str(error))) from None  # msgspec adds the place


def _readable(message: str) -> str:
    """msgspec writes "Expected `int`, got `str` - at `$.pools[0].replicas`"; we put the place first."""
    text, _, place = message.partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    return f"{place}: {text.replace('`', '')}" if place else text.replace("`", "")
