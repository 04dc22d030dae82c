"""What each admission keeps of its promises under overload, in virtual time: four workers, both ways to split them.

python -m benchmarks.admission
"""

from collections.abc import Sequence
from statistics import fmean

from cluster.offline.scoring.records import RequestOutcome, Run
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.load import load_workload
from cluster.spec import ADMISSION, ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.request import SLO

COST = LinearCost(0.010, 0.0001, 0.0, 0.0005, 1e-7, 0.001, 1e-10)  # a small model on a small GPU
ENGINE = EngineConfig(kv_blocks=3000, max_batch_tokens=512, max_running=32)
PROMISE = SLO(ttft_s=2.0, tpot_s=0.03)
RATES = (20.0, 25.0, 40.0)  # a second; 20 is about what can be served
SEEDS = (3, 4, 5)
REQUESTS = 400
KINDS = {
    "four that do both": (PoolSpec("mixed", Role.MIXED, 4, engine=ENGINE),),
    "two and two": (
        PoolSpec("prefill", Role.PREFILL, 2, engine=ENGINE),
        PoolSpec("decode", Role.DECODE, 2, engine=ENGINE),
    ),
}


def overloaded(
    pools: Sequence[PoolSpec], admission: str, rate: float, *, count: int = REQUESTS, seed: int = 3
) -> tuple[float, float]:
    """The share of all requests that had both promises kept, and of those that were served."""
    gateway = GatewaySpec(admission=admission, slo=PROMISE)
    health = HealthSpec(heartbeat_s=1.0, dead_after_s=10.0)
    spec = ClusterSpec("a-model", tuple(pools), gateway=gateway, health=health, executor="modelled")
    workload = load_workload(f"poisson:rate={rate},count={count},lengths=mixed", seed=seed)
    run = simulate(spec, {pool.name: PoolModel(COST) for pool in pools}, workload, RunOptions(slo=PROMISE))
    kept = _num_kept(run)
    served = sum(each.ending is RequestOutcome.FINISHED for each in run.served)
    return kept / len(run.served), kept / max(1, served)


def _num_kept(run: Run) -> int:
    assert PROMISE.ttft_s is not None and PROMISE.tpot_s is not None
    ended = [each for each in run.served if each.ending is RequestOutcome.FINISHED and each.ttft_s is not None]
    return sum((each.ttft_s or 0.0) <= PROMISE.ttft_s and (each.tpot_s or 0.0) <= PROMISE.tpot_s for each in ended)


def main() -> None:
    print(
        f"kept of all / of those served, mean of {len(SEEDS)} seeds; TTFT {PROMISE.ttft_s} s, TPOT {PROMISE.tpot_s} s"
    )
    print(f"{'':20}{'':12}" + "".join(f"{f'{rate:g} a second':>16}" for rate in RATES))
    for kind, pools in KINDS.items():
        for admission in ADMISSION:
            cells = []
            for rate in RATES:
                kept, held = zip(*(overloaded(pools, admission, rate, seed=seed) for seed in SEEDS), strict=True)
                cells.append(f"{100 * fmean(kept):.0f} % / {100 * fmean(held):.0f} %")
            print(f"{kind:20}{admission:12}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
