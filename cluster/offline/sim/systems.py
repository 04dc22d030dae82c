"""Published systems as settings of Diptych: batching, pools, routing. See docs/simulator.md for the sources.

Each runs through the same production code; what a paper does beyond scheduling (kernels, networks) is not modeled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from cluster.offline.workload.arrivals import Workload, mean_lengths
from cluster.policy.scaling.balance import Group, Mix, attained, utilization
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, HealthSpec, PoolSpec, Role, SpecError
from workers.config import EngineConfig, ParallelConfig
from workers.costs import CostModel
from workers.request import SLO

MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"  # pool names
CHUNK = 512  # tokens; of SplitFuse and Sarathi's strict setting
RARE_HEARTBEATS = HealthSpec(heartbeat_s=1.0, dead_after_s=10.0)  # so that a simulation spends less time on them
_CLEARLY = 0.02  # more requests in time than with mixed workers: with less, ours starts with mixed workers
PROMPT_BATCH = 2048  # prompt tokens in one batch; above it throughput falls (Splitwise, section V)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Engine settings of the workers, and how requests are placed.

    `mixed`: of colocated workers; a system without them splits into `prefill` and `decode` workers. Ours does either.
    """

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


_WHOLE_PROMPTS = {"batching": "prefill-first", "max_batch_tokens": PROMPT_BATCH}
_CACHED_CHUNKS = {"batching": "chunked", "max_batch_tokens": PROMPT_BATCH, "prefix_caching": True}
_ADAPTIVE = {
    "batching": "adaptive",
    "max_batch_tokens": PROMPT_BATCH,
    "prompt_order": "deadline",
    "prompt_window": 256,
}
_MOONCAKE = System(prefill=_CACHED_CHUNKS, decode=_WHOLE_PROMPTS, routing="mooncake")

SYSTEMS: dict[str, System] = {
    "static": System(mixed={"batching": "static"}),
    "orca": System(mixed={"batching": "orca", "max_batch_tokens": 1 << 20}),
    "vllm": System(mixed={"batching": "prefill-first"}),
    "sarathi": System(mixed={"batching": "chunked", "max_batch_tokens": CHUNK}),
    "distserve": System(prefill=_WHOLE_PROMPTS, decode=_WHOLE_PROMPTS, routing="distserve"),
    "splitwise": System(prefill=_WHOLE_PROMPTS, decode=_WHOLE_PROMPTS, routing="splitwise"),
    "mooncake": _MOONCAKE,
    "mooncake-predictive": replace(_MOONCAKE, admission="predictive"),
    "ours": System(
        mixed=_ADAPTIVE,
        prefill=_ADAPTIVE,
        decode=_ADAPTIVE,
        routing="slo",
        admission="slo",
        rebalance=True,
        elastic=ElasticSpec(mode="act", period_s=0.5, window_s=15.0, dwell_s=1.0, cooldown_s=2.0),
    ),
}


@dataclass(frozen=True, slots=True)
class EqualWorkers:
    """The workers that every system arranges. `engine`: of one worker; systems change its batching."""

    model: str
    count: int
    engine: EngineConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def system(name: str) -> System:
    """Raises `SpecError` for a name that is not known."""
    if name not in SYSTEMS:
        raise SpecError(f"system {name!r} is not one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def arrange(name: str, fleet: EqualWorkers, prefills: int) -> ClusterSpec:
    """The fleet arranged as this system; one that splits puts `prefills` workers into its prefill pool.

    Ours splits unless `prefills` is 0.

    Raises `SpecError` for an unknown system, and when a pool would be empty.
    """
    chosen = system(name)
    if chosen.mixed is not None and not (prefills and chosen.prefill):
        pools: tuple[PoolSpec, ...] = (_pool(MIXED, Role.MIXED, fleet.count, fleet, chosen.mixed),)
    elif 0 < prefills < fleet.count:
        pools = (
            _pool(PREFILL, Role.PREFILL, prefills, fleet, chosen.prefill),
            _pool(DECODE, Role.DECODE, fleet.count - prefills, fleet, chosen.decode),
        )
    else:
        raise SpecError(
            f"{name} splits its workers: {prefills} of {fleet.count} cannot be the prefill pool; "
            "give it at least one, and leave one to decode"
        )
    return ClusterSpec(
        model=fleet.model,
        pools=pools,
        gateway=GatewaySpec(routing=chosen.routing, admission=chosen.admission, rebalance=chosen.rebalance),
        health=RARE_HEARTBEATS,
        executor="simulated",
        elastic=chosen.elastic,
    )


def _pool(name: str, role: Role, replicas: int, fleet: EqualWorkers, settings: Mapping[str, Any]) -> PoolSpec:
    batch = settings.get("max_batch_tokens", fleet.engine.max_batch_tokens)
    engine = replace(fleet.engine, **{**settings, "max_batch_tokens": max(batch, fleet.engine.max_running)})
    return PoolSpec(name, role, replicas, parallel=fleet.parallel, engine=engine)


def phase_seconds(cost: CostModel, workload: Workload, engine: EngineConfig) -> tuple[float, float]:
    """Seconds of one worker for the prefill and for the decode of the mean request.

    Decode batches are as full as KV and slots allow, as they are at the loads where a split matters.
    """
    prompt, output = mean_lengths(workload.arrivals)
    context = round(prompt + output / 2)
    batch = max(1, min(engine.max_running, engine.kv_blocks * engine.block_size // max(1, context)))
    return cost.prefill_seconds(round(prompt)), output * cost.decode_seconds(batch, batch * context) / batch


def prefills_of(name: str, model: CostModel, fleet: EqualWorkers, workload: Workload, slo: SLO) -> int:
    """The number of prefill workers with which this system starts; 0: all are mixed."""
    chosen = system(name)
    if chosen.mixed is None:
        return balanced(fleet.count, model, workload, fleet.engine)
    return best_start(model, fleet, workload, slo) if chosen.prefill else 0


def best_start(cost: CostModel, fleet: EqualWorkers, workload: Workload, slo: SLO) -> int:
    """The number of prefill workers that our elastic rule rates best for the mean request; 0: all mixed, as in doubt.

    Unlike `balanced` it knows the SLO, cached prefixes, and mixed workers.
    """
    engine = fleet.engine
    prompt, output = mean_lengths(workload.arrivals)
    mix = Mix(
        rate=len(workload.arrivals) / max(workload.duration_s, 1.0),
        prompt_tokens=prompt,
        computed_tokens=prompt * (1.0 - _cached_share(workload)),
        output_tokens=output,
        ttft_s=slo.ttft_s,
        tpot_s=slo.tpot_s,
    )

    def group(role: Role, count: int) -> Group:
        return Group("", role, count, cost, engine.kv_blocks * engine.block_size, engine.max_running)

    rated = {0: attained(utilization([group(Role.MIXED, fleet.count)], mix).worst)}
    for prefills in range(1, fleet.count):
        groups = [group(Role.PREFILL, prefills), group(Role.DECODE, fleet.count - prefills)]
        rated[prefills] = attained(utilization(groups, mix).worst)
    best = max(rated, key=lambda prefills: rated[prefills])
    return best if rated[best] > rated[0] * (1.0 + _CLEARLY) else 0


def _cached_share(workload: Workload) -> float:
    """Of the prompt tokens, those of prefixes that came before."""
    seen: set[int] = set()
    found = 0
    for each in workload.arrivals:
        blocks = len(list(takewhile(seen.__contains__, each.prefix)))
        found += min(blocks * workload.block_tokens, each.prompt_tokens)
        seen.update(each.prefix)
    return found / sum(each.prompt_tokens for each in workload.arrivals)


def balanced(workers: int, cost: CostModel, workload: Workload, engine: EngineConfig) -> int:
    """The number of prefill workers at which both phases of the mean request are equally loaded."""
    prefill_s, decode_s = phase_seconds(cost, workload, engine)
    share = prefill_s / (prefill_s + decode_s) if prefill_s + decode_s else 0.5
    return min(max(1, round(workers * share)), workers - 1)
