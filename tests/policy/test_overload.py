"""Admission by SLO under overload, in virtual time: accepted requests meet their SLO, and more do than without it."""

import pytest

from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.load import load_workload
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.request import SLO

COST = LinearCost(0.010, 0.0001, 0.0, 0.0005, 1e-7, 0.001, 1e-10)  # a small model on a small GPU
ENGINE = EngineConfig(kv_blocks=3000, max_batch_tokens=512, max_running=32)
TTFT_S, TPOT_S = 2.0, 0.03
POOLS = (
    PoolSpec("prefill", Role.PREFILL, 2, engine=ENGINE),
    PoolSpec("decode", Role.DECODE, 2, engine=ENGINE),
)


def attainment(admission: str) -> tuple[float, float]:
    """Share of all requests that met both SLOs, and share of those that were served; at twice what fits."""
    slo = SLO(ttft_s=TTFT_S, tpot_s=TPOT_S)
    spec = ClusterSpec(
        "a-model",
        POOLS,
        gateway=GatewaySpec(admission=admission, slo=slo),
        health=HealthSpec(heartbeat_s=1.0, dead_after_s=10.0),
        executor="simulated",
    )
    workload = load_workload("poisson:rate=40,count=200,lengths=mixed", seed=3)
    run = simulate(spec, {pool.name: PoolModel(COST) for pool in POOLS}, workload, RunOptions(slo=slo))
    served = [each for each in run.served if each.outcome is RequestOutcome.FINISHED and each.ttft_s is not None]
    met = sum((each.ttft_s or 0.0) <= TTFT_S and (each.tpot_s or 0.0) <= TPOT_S for each in served)
    return met / len(run.served), met / max(1, len(served))


@pytest.mark.campaign
def test_admission_by_slo_serves_more_requests_within_their_slo() -> None:
    met_without_admission, _ = attainment("none")
    met, met_of_served = attainment("slo")
    assert met_of_served >= 0.97
    assert met >= 1.1 * met_without_admission
