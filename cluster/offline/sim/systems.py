"""The systems of the field as settings of ours: who batches how, which pools there are, who is sent where.

Each runs through the same production code; what a paper does beyond its scheduling (kernels, networks) is not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.offline.workload.arrivals import Workload
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, HealthSpec, PoolSpec, Role, SpecError
from workers.config import EngineConfig, ParallelConfig, TransferConfig
from workers.costs import CostModel

MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"  # pool names
CHUNK = 512  # tokens; of SplitFuse and Sarathi's strict setting
PROMPT_BATCH = 2048  # tokens of prompts in one batch; above it throughput falls (Splitwise, section V)


@dataclass(frozen=True, slots=True)
class System:
    """What a system changes about its workers' engines, and how requests are placed.

    `mixed` are engine settings of colocated workers; a system without them splits into `prefill` and `decode` workers.
    """

    title: str
    source: str
    mixed: Mapping[str, Any] | None = None
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    routing: str = "least-loaded"
    admission: str = "none"
    rebalance: bool = False
    elastic: ElasticSpec = field(default_factory=ElasticSpec)

    @property
    def is_split(self) -> bool:
        return self.mixed is None


_SPLIT_BATCHES: dict[str, Any] = {
    "prefill": {"batching": "prefill-first", "max_batch_tokens": PROMPT_BATCH},
    "decode": {"batching": "prefill-first", "max_batch_tokens": PROMPT_BATCH},
}
_MOONCAKE: dict[str, Any] = {
    "prefill": {"batching": "chunked", "max_batch_tokens": PROMPT_BATCH, "prefix_caching": True},
    "decode": {"batching": "prefill-first", "max_batch_tokens": PROMPT_BATCH},
}
_IN_TIME: dict[str, Any] = {"prompt_order": "deadline", "prompt_window": 256}


SYSTEMS: dict[str, System] = {
    "static": System("static batching", "request-level batches", {"batching": "static"}),
    "orca": System("Orca", "Yu et al., OSDI'22", {"batching": "orca", "max_batch_tokens": 1 << 20}),
    "vllm": System("vLLM, prefill first", "Kwon et al., SOSP'23", {"batching": "prefill-first"}),
    "sarathi": System(
        "chunked prefill",
        "Agrawal et al., OSDI'24; Holmes et al., 2024",
        {"batching": "chunked", "max_batch_tokens": CHUNK},
    ),
    "distserve": System("DistServe", "Zhong et al., OSDI'24", **_SPLIT_BATCHES, routing="distserve"),
    "splitwise": System("Splitwise", "Patel et al., ISCA'24", **_SPLIT_BATCHES, routing="splitwise"),
    "mooncake": System("Mooncake", "Qin et al., FAST'25", **_MOONCAKE, routing="mooncake"),
    "mooncake-predictive": System(
        "Mooncake, predictive early rejection",
        "Qin et al., 2024 (arXiv 2407.00079)",
        **_MOONCAKE,
        routing="mooncake",
        admission="predictive",
    ),
    "ours": System(
        "Diptych",
        "router by both promises, admission that keeps them, roles that follow the load",
        prefill={"batching": "adaptive", "max_batch_tokens": PROMPT_BATCH, **_IN_TIME},
        decode={"batching": "adaptive", "max_batch_tokens": PROMPT_BATCH, **_IN_TIME},
        routing="slo",
        admission="slo",
        rebalance=True,
        elastic=ElasticSpec(mode="act", period_s=0.5, window_s=15.0, margin=0.05, dwell_s=1.0, cooldown_s=2.0),
    ),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """What every system gets to arrange: equal workers. `engine`: of one worker, its KV blocks above all."""

    model: str
    workers: int
    engine: EngineConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    health: HealthSpec = field(default_factory=lambda: HealthSpec(heartbeat_s=1.0, dead_after_s=10.0))


def system(name: str) -> System:
    """Raises `SpecError` for a name that is not known."""
    if name not in SYSTEMS:
        raise SpecError(f"system {name!r} is not one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def arrange(name: str, fleet: Fleet, prefills: int) -> ClusterSpec:
    """The fleet as this system has it; one that splits makes `prefills` of the workers its prefill pool.

    Raises `SpecError` when the system is not known or nobody is left to decode.
    """
    chosen = system(name)
    if chosen.mixed is not None:
        pools: tuple[PoolSpec, ...] = (_pool(MIXED, Role.MIXED, fleet.workers, fleet, chosen.mixed),)
    elif 0 < prefills < fleet.workers:
        pools = (
            _pool(PREFILL, Role.PREFILL, prefills, fleet, chosen.prefill),
            _pool(DECODE, Role.DECODE, fleet.workers - prefills, fleet, chosen.decode),
        )
    else:
        raise SpecError(
            f"{name} splits its workers: {prefills} of {fleet.workers} cannot be the prefill pool; "
            "give it at least one, and leave one to decode"
        )
    return ClusterSpec(
        model=fleet.model,
        pools=pools,
        transfer=fleet.transfer,
        gateway=replace(fleet.gateway, routing=chosen.routing, admission=chosen.admission, rebalance=chosen.rebalance),
        health=fleet.health,
        executor="modelled",
        elastic=chosen.elastic,
    )


def _pool(name: str, role: Role, replicas: int, fleet: Fleet, settings: Mapping[str, Any]) -> PoolSpec:
    batch = settings.get("max_batch_tokens", fleet.engine.max_batch_tokens)
    engine = replace(fleet.engine, **{**settings, "max_batch_tokens": max(batch, fleet.engine.max_running)})
    return PoolSpec(name, role, replicas, parallel=fleet.parallel, engine=engine)


def balanced(workers: int, cost: CostModel, workload: Workload, engine: EngineConfig) -> int:
    """How many of the workers prefill so that both phases of the mean request are equally loaded.

    A decode step is taken to be as full as KV and slots allow, as under the load at which a split matters.
    """
    count = len(workload.arrivals)
    prompt = round(sum(each.prompt_tokens for each in workload.arrivals) / count)
    output = sum(each.output_tokens for each in workload.arrivals) / count
    context = prompt + round(output / 2)
    batch = max(1, min(engine.max_running, engine.kv_blocks * engine.block_size // max(1, context)))
    prefill_s = cost.prefill_seconds(prompt)
    decode_s = output * cost.decode_seconds(batch, batch * context) / batch
    share = prefill_s / (prefill_s + decode_s) if prefill_s + decode_s else 0.5
    return min(max(1, round(workers * share)), workers - 1)
