"""A layout as a cluster: which workers of which shape on which GPUs, as `serve` takes it and as it is simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.offline.plan.asked import PlanRequest
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.compare import Case
from cluster.offline.sim.fleet import BLOCK_SIZE, MAX_RUNNING
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Resources, Role
from workers.config import EngineConfig, ParallelConfig
from workers.costs import LinearCost
from workers.profiles.capacity import kv_capacity_tokens
from workers.profiles.sources import CROSS, NODE, NetworkLink, link_of, profile_of

PROMPT_BATCH = 2048  # tokens of prompts in a step; above it throughput falls (Splitwise, section V)
FREE_KV_TOKENS = 1 << 20
_DTYPES = {4: "float32", 2: "bfloat16"}


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Equal workers of one pool."""

    role: Role
    hardware: str
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    batching: str = "chunked"
    batch_tokens: int = PROMPT_BATCH

    @property
    def gpus_each(self) -> int:
        return self.tensor * self.pipeline

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpus_each

    @property
    def told(self) -> str:
        """`2 x prefill TP2 PP1`, with the chunk where it matters."""
        steps = self.batching if self.batching == "prefill-first" else f"chunk {self.batch_tokens}"
        cut = "" if self.role is Role.DECODE else f", {steps}"
        return f"{self.replicas} x {self.role.value} TP{self.tensor} PP{self.pipeline} on {self.hardware}{cut}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Pools side by side. `kind` is "colocated", "split" or "hybrid"."""

    kind: str
    groups: tuple[WorkerGroup, ...]
    routing: str = "least-loaded"

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def told(self) -> str:
        routed = "" if self.routing == "least-loaded" else f", routed as {self.routing}"
        return f"{self.kind}: {' + '.join(group.told for group in self.groups)}{routed}"

    def times(self, *replicas: int) -> "Layout":
        """The same groups with so many workers each."""
        groups = zip(self.groups, replicas, strict=True)
        return replace(self, groups=tuple(replace(group, replicas=count) for group, count in groups))


def kv_blocks(asked: PlanRequest, group: WorkerGroup) -> int:
    """Of one worker. Raises `DoesNotFit`."""
    tokens = kv_capacity_tokens(asked.shape, asked.sheets[group.hardware], group.tensor, group.pipeline)
    return tokens // BLOCK_SIZE


def engine_of(asked: PlanRequest, group: WorkerGroup) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK_SIZE,
        kv_blocks=kv_blocks(asked, group),
        batching=group.batching,
        max_batch_tokens=group.batch_tokens,
        max_running=min(MAX_RUNNING, group.batch_tokens),
        max_waiting=4096,
        dtype=_DTYPES.get(asked.shape.element_bytes, "bfloat16"),
    )


def spec_of(asked: PlanRequest, layout: Layout) -> ClusterSpec:
    """As `serve` takes it. Raises `DoesNotFit`."""
    several = len({group.hardware for group in layout.groups}) > 1
    pools = tuple(
        PoolSpec(
            name=group.role.value,
            role=group.role,
            replicas=group.replicas,
            parallel=ParallelConfig(group.tensor, group.pipeline),
            engine=engine_of(asked, group),
            resources=Resources(gpu=1, custom=_kind(asked.sheets[group.hardware].name) if several else {}),
            hardware=group.hardware,
        )
        for group in layout.groups
    )
    requests = 2 * sum(pool.replicas * pool.engine.max_running for pool in pools)
    gateway = GatewaySpec(max_requests=requests, routing=layout.routing, slo=asked.slo)
    return ClusterSpec(model=asked.model, pools=pools, gateway=gateway)


def _kind(hardware: str) -> dict[str, float]:
    """Ray marks nodes by the kind of their accelerators."""
    return {f"accelerator_type:{hardware.split('-')[0].upper()}": 0.001}


def models_of(asked: PlanRequest, layout: Layout) -> dict[str, PoolModel]:
    """By pool name. KV leaves a node only when the network is fast and one node cannot hold all."""
    where = NODE if asked.network == "slow" or asked.one_node(layout.gpus) else CROSS
    links = [link_of(asked.sheets[group.hardware], where) for group in layout.groups]
    slowest = max(links, key=lambda link: link.byte_s)
    ends = min(group.gpus_each for group in layout.groups)
    return {group.role.value: _model(asked, group, slowest, ends) for group in layout.groups}


def _model(asked: PlanRequest, group: WorkerGroup, link: NetworkLink, ends: int) -> PoolModel:
    """`ends`: as many links move a worker's KV as its smaller side has GPUs."""
    sheet = asked.sheets[group.hardware]
    way = replace(link, byte_s=link.byte_s * group.gpus_each / ends)
    cost = profile_of(asked.shape, sheet, group.tensor, group.pipeline, asked.sources[group.hardware], way).cost
    return PoolModel(
        cost=cost,
        kv_token_bytes=asked.shape.kv_bytes_per_token,
        vocab_size=asked.shape.vocab,
        shape=asked.shape,
        peak_flops=group.gpus_each * sheet.flops_of(asked.shape.element_bytes),
    )


def case_of(asked: PlanRequest, layout: Layout) -> Case:
    """To be simulated. Raises `DoesNotFit` and `ProfileError`."""
    return Case(layout.told, _quick(asked, spec_of(asked, layout)), models_of(asked, layout))


def prefill_alone(asked: PlanRequest, group: WorkerGroup) -> Case:
    """One instance that takes whole requests: those of one token stay on the worker that computed their prompt."""
    layout = Layout("colocated", (replace(group, role=Role.MIXED, replicas=1),))
    return replace(case_of(asked, layout), name=f"{replace(group, replicas=1).told}, alone")


def decode_alone(asked: PlanRequest, group: WorkerGroup) -> Case:
    """One instance behind a prefill worker for which prompts and hand-offs take no time."""
    layout = Layout("split", (replace(group, replicas=1),))
    free = LinearCost(*[0.0] * 8)
    blocks = max(FREE_KV_TOKENS // BLOCK_SIZE, 2 * kv_blocks(asked, group))
    engine = replace(engine_of(asked, group), kv_blocks=blocks, max_batch_tokens=FREE_KV_TOKENS)
    decode = PoolSpec(
        "decode", Role.DECODE, 1, parallel=ParallelConfig(group.tensor, group.pipeline), engine=engine_of(asked, group)
    )
    spec = ClusterSpec(
        model=asked.model,
        pools=(PoolSpec("prefill", Role.PREFILL, 1, engine=replace(engine, batching="prefill-first")), decode),
        gateway=GatewaySpec(slo=asked.slo),
    )
    model = models_of(asked, replace(layout, groups=(replace(group, role=Role.DECODE),)))["decode"]
    cost = replace(model.cost, transfer_latency_s=0.0, transfer_byte_s=0.0)  # type: ignore[type-var]
    models: Mapping[str, PoolModel] = {
        "prefill": replace(model, cost=free),
        "decode": replace(model, cost=cost),
    }
    return Case(f"{replace(group, replicas=1).told}, alone", _quick(asked, spec), models)


def _quick(asked: PlanRequest, spec: ClusterSpec) -> ClusterSpec:
    """What simulates faster and comes to the same: rarer signs of life, and no prefixes looked up where none recur."""
    caching = asked.load.has_prefixes
    pools = tuple(replace(pool, engine=replace(pool.engine, prefix_caching=caching)) for pool in spec.pools)
    return replace(spec, pools=pools, health=HealthSpec(heartbeat_s=1.0, dead_after_s=10.0))
