"""Clusters of H100 and A100 workers in virtual time. H100s prefill 2 times and decode 1.4 times as fast as A100s."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.offline.scoring.figures import attainment
from cluster.offline.scoring.records import Run
from cluster.offline.sim.fleet import fleet, models_of
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.load import load_workload
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import ParallelConfig
from workers.request import SLO

MODEL, H100, A100 = "llama-2-70b", "h100-80gb", "a100-80gb"
TTFT_S, TPOT_S = 4.0, 0.075
TIGHT = SLO(ttft_s=TTFT_S, tpot_s=TPOT_S)
FIXED = ElasticSpec()
ELASTIC = ElasticSpec(mode="act", window_s=15.0, dwell_s=1.0, cooldown_s=2.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """Workers with one kind of GPU and an initial role."""

    hardware: str
    workers: int
    role: Role
    tensor: int = 4
    block_size: int = 16

    def pool(self, number: int) -> PoolSpec:
        parallel = ParallelConfig(self.tensor)
        engine = fleet(MODEL, self.hardware, parallel, self.workers).engine
        engine = replace(
            engine,
            kv_blocks=engine.kv_blocks * engine.block_size // self.block_size,
            block_size=self.block_size,
            batching="adaptive",
            max_batch_tokens=2048,
        )
        name = f"{self.hardware.partition('-')[0]}-{number}"
        return PoolSpec(name, self.role, self.workers, parallel=parallel, engine=engine, hardware=self.hardware)


FAST_FIRST = (Kind(H100, 2, Role.PREFILL), Kind(A100, 2, Role.DECODE))
CHEAP_FIRST = (Kind(H100, 2, Role.DECODE), Kind(A100, 2, Role.PREFILL))
BOTH = (Kind(H100, 2, Role.MIXED), Kind(A100, 2, Role.MIXED))


def cluster_of(kinds: Sequence[Kind], elastic: ElasticSpec) -> ClusterSpec:
    return ClusterSpec(
        MODEL,
        tuple(kind.pool(number) for number, kind in enumerate(kinds)),
        gateway=GatewaySpec(routing="slo", slo=TIGHT),
        health=HealthSpec(heartbeat_s=1.0, dead_after_s=10.0),
        executor="simulated",
        elastic=elastic,
    )


def run_long_prompts(kinds: Sequence[Kind], elastic: ElasticSpec, rate: float, duration_s: float) -> Run:
    """Runs until the last request has met or missed its SLO."""
    spec = cluster_of(kinds, elastic)
    workload = load_workload(f"poisson:rate={rate},duration={duration_s},lengths=1500-4000/20-120", seed=0)
    longest = max(each.output_tokens for each in workload.arrivals)
    until_s = workload.duration_s + TTFT_S + longest * TPOT_S
    return simulate(spec, models_of(spec), workload, RunOptions(0, TIGHT, until_s=until_s))


def share_prefilled_by_h100s(run: Run) -> float:
    prompts = {each.name: each.prompt_tokens for each in run.workers}
    return sum(count for name, count in prompts.items() if name.startswith("h100")) / sum(prompts.values())


def both_slos(run: Run) -> float:
    """Share of the requests that met both SLOs."""
    return attainment(run, TIGHT).both
