"""A layout as a cluster: the specification that `serve` reads, and the same cluster to simulate."""

from dataclasses import dataclass, replace

from cluster.offline.plan.request import PlanRequest
from cluster.offline.sim.case import Case, PoolModel
from cluster.offline.sim.fleet import MAX_RUNNING, pool_model
from cluster.offline.sim.systems import PROMPT_BATCH, RARE_HEARTBEATS
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Resources, Role
from workers.config import EngineConfig, ParallelConfig
from workers.costs import LinearCost
from workers.profiles.capacity import kv_capacity_tokens
from workers.profiles.sources import INTER_NODE, INTRA_NODE, link_of

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
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(self.tensor, self.pipeline)

    @property
    def gpus_each(self) -> int:
        return self.tensor * self.pipeline

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpus_each

    @property
    def description(self) -> str:
        """Such as `2 x prefill TP2 PP1 on h100-80gb, chunk 2048`."""
        steps = self.batching if self.batching == "prefill-first" else f"chunk {self.batch_tokens}"
        chunk = "" if self.role is Role.DECODE else f", {steps}"
        return f"{self.replicas} x {self.role.value} TP{self.tensor} PP{self.pipeline} on {self.hardware}{chunk}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Pools of one cluster: one mixed group, or a prefill and a decode group. `kind`: colocated, split or hybrid."""

    kind: str
    groups: tuple[WorkerGroup, ...]
    routing: str = "least-loaded"

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def description(self) -> str:
        routed = "" if self.routing == "least-loaded" else f", routed as {self.routing}"
        return f"{self.kind}: {' + '.join(group.description for group in self.groups)}{routed}"

    def times(self, *replicas: int) -> "Layout":
        """The same groups with these numbers of workers."""
        groups = zip(self.groups, replicas, strict=True)
        return replace(self, groups=tuple(replace(group, replicas=count) for group, count in groups))


def engine_of(request: PlanRequest, group: WorkerGroup) -> EngineConfig:
    """With all the KV blocks that one worker has room for. Raises `DoesNotFit`."""
    tokens = kv_capacity_tokens(request.shape, request.sheets[group.hardware], group.tensor, group.pipeline)
    return EngineConfig(
        block_size=request.shape.block_size,
        kv_blocks=tokens // request.shape.block_size,
        batching=group.batching,
        max_batch_tokens=group.batch_tokens,
        max_running=min(MAX_RUNNING, group.batch_tokens),
        max_waiting=4096,
        dtype=request.kv_dtype or _DTYPES.get(request.shape.element_bytes, "bfloat16"),
    )


def spec_of(request: PlanRequest, layout: Layout) -> ClusterSpec:
    """As `serve` reads it. Raises `DoesNotFit`."""
    several_kinds = len({group.hardware for group in layout.groups}) > 1
    pools = tuple(
        PoolSpec(
            name=group.role.value,
            role=group.role,
            replicas=group.replicas,
            parallel=group.parallel,
            engine=engine_of(request, group),
            resources=Resources(
                gpu=1, custom=_accelerator(request.sheets[group.hardware].name) if several_kinds else {}
            ),
            hardware=group.hardware,
        )
        for group in layout.groups
    )
    requests = 2 * sum(pool.replicas * pool.engine.max_running for pool in pools)
    gateway = GatewaySpec(max_requests=requests, routing=layout.routing, slo=request.slo)
    return ClusterSpec(model=request.model, pools=pools, gateway=gateway)


def _accelerator(hardware: str) -> dict[str, float]:
    """Ray's resource that marks nodes with this kind of GPU."""
    return {f"accelerator_type:{hardware.split('-')[0].upper()}": 0.001}


def models_of(request: PlanRequest, layout: Layout) -> dict[str, PoolModel]:
    """By pool name. KV leaves a node only when it may and one node cannot hold all GPUs.

    A worker's KV moves over as many links at once as the smaller side has GPUs, each as fast as the slowest.
    """
    where = INTRA_NODE if request.kv_link == INTRA_NODE or request.one_node(layout.gpus) else INTER_NODE
    links = [link_of(request.sheets[group.hardware], where) for group in layout.groups]
    slowest = max(links, key=lambda link: link.byte_s)
    num_links = min(group.gpus_each for group in layout.groups)
    return {
        group.role.value: pool_model(
            request.shape,
            request.sheets[group.hardware],
            group.parallel,
            source=request.sources[group.hardware],
            link=replace(slowest, byte_s=slowest.byte_s * group.gpus_each / num_links),
        )
        for group in layout.groups
    }


def case_of(request: PlanRequest, layout: Layout) -> Case:
    """To simulate. Raises `DoesNotFit` and `ProfileError`."""
    return Case(layout.description, _quick(request, spec_of(request, layout)), models_of(request, layout))


def prefill_alone(request: PlanRequest, group: WorkerGroup) -> Case:
    """One mixed instance: a request of one token stays on the worker that computed its prompt."""
    case = case_of(request, Layout("colocated", (replace(group, role=Role.MIXED, replicas=1),)))
    return replace(case, name=f"{replace(group, replicas=1).description}, alone")


def decode_alone(request: PlanRequest, group: WorkerGroup) -> Case:
    """One instance behind a prefill worker for which prompts and KV handoffs take no time."""
    group = replace(group, role=Role.DECODE, replicas=1)
    engine = engine_of(request, group)
    blocks = max(FREE_KV_TOKENS // engine.block_size, 2 * engine.kv_blocks)
    prompts = replace(engine, kv_blocks=blocks, max_batch_tokens=FREE_KV_TOKENS, batching="prefill-first")
    spec = ClusterSpec(
        model=request.model,
        pools=(
            PoolSpec("prefill", Role.PREFILL, 1, engine=prompts),
            PoolSpec("decode", Role.DECODE, 1, parallel=group.parallel, engine=engine),
        ),
        gateway=GatewaySpec(slo=request.slo),
    )
    model = models_of(request, Layout("split", (group,)))["decode"]
    cost = replace(model.cost, transfer_latency_s=0.0, transfer_byte_s=0.0)  # type: ignore[type-var]
    models = {"prefill": replace(model, cost=LinearCost(*[0.0] * 8)), "decode": replace(model, cost=cost)}
    return Case(f"{group.description}, alone", _quick(request, spec), models)


def _quick(request: PlanRequest, spec: ClusterSpec) -> ClusterSpec:
    """The same, faster to simulate: fewer heartbeats, and no prefix cache where no prefix recurs."""
    caching = request.load.has_prefixes
    pools = tuple(replace(pool, engine=replace(pool.engine, prefix_caching=caching)) for pool in spec.pools)
    return replace(spec, pools=pools, health=RARE_HEARTBEATS)
