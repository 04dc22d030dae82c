"""What Mooncake's papers say of routers and rejection, on its own trace (Qin et al., FAST'25 and arXiv 2407.00079).

Their 16 nodes of 8 A800 became 8 prefill and 8 decode workers on a roofline of that machine. The trace's answers are
cut short where only the first token is looked at. The order of the routers and of the rejection policies is tested;
the papers' own figures stand beside ours in docs/simulator.md.
"""

import os
import random
from dataclasses import replace
from statistics import fmean

import pytest

from cluster.offline.scoring.records import RequestOutcome, Run
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.sim.systems import arrange
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.load import load_workload
from cluster.spec import ClusterSpec
from tests.offline.sim.cases import ENGINE, colocated, models
from tests.offline.workload.summary import prefix_reuse
from tests.shared import shared
from workers.config import ParallelConfig
from workers.request import SLO

pytestmark = pytest.mark.full

WHOLE = bool(os.environ.get("DIPTYCH_LITERATURE"))
TRACE = "traces/mooncake/conversation_trace.jsonl.gz"
BLOCK = 512


def cluster_of(routing: str, admission: str = "none", workers: int = 16) -> tuple[ClusterSpec, dict[str, PoolModel]]:
    parallel = ParallelConfig(tensor=8)
    made = fleet("llama-3-70b", "a800", parallel, workers)
    blocks = made.engine.kv_blocks * made.engine.block_size // BLOCK
    made = replace(made, engine=replace(made.engine, block_size=BLOCK, kv_blocks=blocks))
    spec = arrange("mooncake", made, workers // 2)
    gateway = replace(spec.gateway, routing=routing, admission=admission, placement_timeout_s=3600.0)
    model = pool_model("llama-3-70b", "a800", parallel)
    return replace(spec, gateway=gateway), {"prefill": model, "decode": model}


def conversations(users: int, turns: int, think_s: float) -> Workload:
    """Every user comes back, after a while, with all that was said before: prefixes grow from turn to turn."""
    draw = random.Random("conversations")
    rows = []
    for user in range(users):
        at_s = draw.uniform(0.0, think_s)
        blocks = draw.randint(4, 30)
        for _ in range(turns):
            prefix = (0, *(1 + user * 1000 + block for block in range(blocks - 1)))
            rows.append(Arrival(at_s, blocks * BLOCK, 2, prefix))
            at_s += draw.expovariate(1.0 / think_s)
            blocks += draw.randint(2, 10)
    return Workload("conversations", tuple(sorted(rows, key=lambda row: row.at_s)), BLOCK)


def mean_ttft_s(run: Run) -> float:
    return fmean(each.ttft_s or 0.0 for each in run.served)


def by_router(workload: Workload, workers: int) -> dict[str, float]:
    times = {}
    for routing in ("random", "least-loaded", "mooncake-local", "mooncake"):
        spec, made = cluster_of(routing, workers=workers)
        times[routing] = mean_ttft_s(simulate(spec, made, workload))
    print({routing: round(ttft_s, 2) for routing, ttft_s in times.items()})
    return times


def test_routers_with_more_information_have_lower_ttft() -> None:
    times = by_router(conversations(users=48, turns=5, think_s=14.0), workers=8)
    assert times["random"] > times["least-loaded"] > times["mooncake-local"] > times["mooncake"]


@pytest.mark.skipif(not WHOLE, reason="takes minutes: make literature")
@pytest.mark.timeout(1800)
def test_routers_on_the_papers_trace() -> None:
    """The paper: 19.65, 5.27, 3.58 and 3.07 s (FAST'25, figure 5)."""
    trace = load_workload(f"{shared(TRACE)}:first=2500,speed=1.3", seed=0)
    short = trace.with_note([replace(each, output_tokens=4) for each in trace.arrivals], "answers of 4 tokens")
    times = by_router(short, workers=16)
    assert times["random"] > times["least-loaded"] > times["mooncake-local"] > times["mooncake"]


@pytest.mark.parametrize("capacity", [150, 400])
def test_an_engine_finds_what_a_cache_of_its_size_would_hold(capacity: int) -> None:
    """One worker, requests one by one: hits are those of an LRU list, up to the blocks that a prompt itself needs."""
    trace = load_workload(f"{shared(TRACE)}:first=120,jitter=off,clip=20000", seed=0)
    apart = [replace(each, at_s=30.0 * n, output_tokens=1) for n, each in enumerate(trace.arrivals)]
    workload = trace.with_note(apart, "one by one")
    engine = replace(ENGINE, block_size=BLOCK, kv_blocks=capacity + 2, max_batch_tokens=1 << 15)
    run = simulate(colocated(engine=engine), models(colocated()), workload)
    found = sum(each.cached_tokens for each in run.served) / sum(each.prompt_tokens for each in run.served)
    assert found == pytest.approx(prefix_reuse(workload, capacity), abs=0.01)


def test_prediction_refuses_before_the_prefill() -> None:
    """Arxiv version, section 7.1: a request that is refused behind its prefill wastes it. Prediction wastes none."""
    overload = load_workload("poisson:rate=6,count=160,lengths=2000-4000/150-300", seed=1)
    spec, made = cluster_of("mooncake", "predictive", workers=4)
    run = simulate(spec, made, overload, RunOptions(slo=SLO(15.0, 0.0268)))  # a decode step of 16 sequences
    refused = [each for each in run.served if each.outcome is RequestOutcome.REJECTED]
    assert refused and not any(each.token_s for each in refused)


@pytest.mark.skipif(not WHOLE, reason="takes minutes: make literature")
@pytest.mark.timeout(1800)
def test_rejections_on_the_papers_trace() -> None:
    """The paper: 3,589 of 23,000 rejected by prediction; 8 + 8 machines at twice the trace's speed."""
    trace = load_workload(f"{shared(TRACE)}:first=2000,speed=2.5", seed=0)
    spec, made = cluster_of("mooncake", "predictive")
    run = simulate(spec, made, trace, RunOptions(slo=SLO(30.0, 0.03)))
    refused = [each for each in run.served if each.outcome is RequestOutcome.REJECTED]
    print(f"{len(refused)} rejected")
    assert 0 < len(refused) < 0.16 * len(run.served)
    assert not any(each.token_s for each in refused), "no refused prompt was computed"
