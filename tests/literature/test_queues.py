"""Queues with known answers: the simulator against closed forms, and against Lindley's recursion to the nanosecond.

Zhong et al., DistServe (OSDI'24), section 3.1: uniform prompts, Poisson arrivals, first come first served, no batching.
"""

from dataclasses import replace
from itertools import accumulate
from statistics import fmean

import pytest

from cluster.offline.scoring.records import Run
from cluster.offline.sim.run import simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.load import load_workload
from tests.literature.closed_forms import crossover_load, single_ttft_s, tensor_ttft_s, two_stage_ttft_s
from tests.offline.sim.cases import colocated, models
from workers.config import EngineConfig, ParallelConfig
from workers.costs import LinearCost

D_S = 0.1  # a prompt on one device
PROMPT = 64
ONE_AT_A_TIME = EngineConfig(
    kv_blocks=4000, max_running=1, max_batch_tokens=PROMPT, max_waiting=1 << 20, prefix_caching=False
)


def prefills(load: float, count: int, *, seconds: float = D_S, stages: int = 1, seed: int = 1) -> Run:
    """Prompts of equal length that each take so long, at this utilization of one device of speed 1."""
    drawn = load_workload(f"poisson:rate={load / D_S},count={count},lengths={PROMPT}/1", seed=seed)
    engine = replace(ONE_AT_A_TIME, max_running=stages)
    spec = colocated(engine=replace(engine, max_batch_tokens=PROMPT))
    spec = replace(spec, pools=(replace(spec.pools[0], parallel=ParallelConfig(pipeline=stages)),))
    return simulate(spec, models(spec, LinearCost(seconds, 0.0, 0.0, 0.0, 0.0)), drawn)


def mean_ttft_s(run: Run) -> float:
    return fmean(served.ttft_s or 0.0 for served in run.served)


def lindley(run: Run, service_s: float, behind_s: float = 0.0) -> list[float]:
    """Each request's time: it waits for the one before it to leave the first stage."""
    arrivals = [served.arrival_s for served in run.served]
    free = accumulate(arrivals[1:], lambda left, at_s: max(left, at_s) + service_s, initial=arrivals[0] + service_s)
    return [left - at_s + behind_s for left, at_s in zip(free, arrivals, strict=True)]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_one_device_is_an_md1_queue(load: float) -> None:
    run = prefills(load, 300)
    assert [served.ttft_s for served in run.served] == pytest.approx(lindley(run, D_S), abs=1e-8)


@pytest.mark.parametrize("load", [0.6, 1.4])
def test_two_stages_queue_for_half_as_long(load: float) -> None:
    run = prefills(load, 300, stages=2)
    assert [served.ttft_s for served in run.served] == pytest.approx(lindley(run, D_S / 2, D_S / 2), abs=1e-8)


@pytest.mark.full
def test_mean_times_are_those_of_the_formulas() -> None:
    """Within what 1,500 draws allow; that nothing else is off is what Lindley's recursion shows."""
    rate = 0.5 / D_S
    assert mean_ttft_s(prefills(0.5, 1500)) == pytest.approx(single_ttft_s(rate, D_S), rel=0.08)
    assert mean_ttft_s(prefills(0.5, 1500, stages=2)) == pytest.approx(two_stage_ttft_s(rate, D_S), rel=0.08)
    tensor = mean_ttft_s(prefills(0.5, 1500, seconds=D_S / 1.5))
    assert tensor == pytest.approx(tensor_ttft_s(rate, D_S, 1.5), rel=0.08)


@pytest.mark.grid
@pytest.mark.parametrize("speedup", [1.3, 1.7])
def test_tensor_parallelism_wins_below_the_crossover_and_pipelining_above_it(speedup: float) -> None:
    border = crossover_load(speedup)

    def tensor_over_pipeline(load: float) -> float:
        return mean_ttft_s(prefills(load, 500, seconds=D_S / speedup)) / mean_ttft_s(prefills(load, 500, stages=2))

    assert tensor_over_pipeline(border - 0.25) < 1.0 < tensor_over_pipeline(border + 0.12)


def test_two_replicas_are_two_queues() -> None:
    """Arrivals dealt out in turn: each replica sees every second one."""
    spec = colocated(2, engine=ONE_AT_A_TIME)
    spec = replace(spec, gateway=replace(spec.gateway, routing="round-robin"))
    arrivals = tuple(Arrival(index * 0.06, PROMPT, 1) for index in range(40))
    run = simulate(spec, models(spec, LinearCost(D_S, 0.0, 0.0, 0.0, 0.0)), Workload("equal", arrivals))
    assert [served.ttft_s for served in run.served] == pytest.approx([D_S] * 40, abs=1e-9)
