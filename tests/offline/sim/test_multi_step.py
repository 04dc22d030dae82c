"""Steps that run as one change nothing that a run yields, to the bit: over systems, seeds, faults and migrations."""

import asyncio
import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import ClusterError, Delta, Event
from cluster.offline.scoring.records import Run
from cluster.offline.sim.case import PoolModel
from cluster.offline.sim.clock import run as run_virtual
from cluster.offline.sim.cluster import Environment, open_cluster
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.sim.systems import SYSTEMS, arrange
from cluster.offline.workload.load import load_workload
from cluster.spec import ClusterSpec
from tests.offline.sim.cases import ENGINE, colocated, models, split, tiered
from workers.config import ParallelConfig
from workers.engine.engine import Engine
from workers.request import SLO, Request, SamplingParams

MIXED, LONG = "gamma:rate=30,cv=3,lengths=mixed,count=60", "poisson:rate=8,lengths=50-150/400,count=40"
SEVERAL, SINGLE = Environment(), Environment(multi_step=False)
LOAD = "gamma:rate={rate},cv=2,lengths=200-900/90,count=60"
ONE_GPU = ParallelConfig()
SLOW = pytest.mark.full


def digest(run: Run) -> str:
    """Of everything that a run yields but the time that it took."""
    kept = replace(run, wall_s=0.0, served=())
    served = [replace(each, token_s=tuple(each.token_s)) for each in run.served]
    return hashlib.sha256(repr((kept, served)).encode()).hexdigest()


def both(spec: ClusterSpec, costs: Mapping[str, PoolModel], load: str, seed: int, options: RunOptions) -> None:
    workload = load_workload(load, seed=seed)
    several, single = (
        simulate(spec, costs, workload, replace(options, environment=each)) for each in (SEVERAL, SINGLE)
    )
    for one, other in zip(several.served, single.served, strict=True):
        assert list(one.token_s) == list(other.token_s), f"request {one.index}"
    assert digest(several) == digest(single)


@pytest.fixture
def num_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    """Steps that ran as one, and all others."""
    counts = [0, 0]
    count, commit = Engine.count_decodes, Engine.commit

    def counted(self: Engine, seconds: Sequence[float]) -> None:
        counts[0] += len(seconds)
        count(self, seconds)

    def counted_commit(self: Engine, *args: object) -> None:
        counts[1] += 1
        commit(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "count_decodes", counted)
    monkeypatch.setattr(Engine, "commit", counted_commit)
    return lambda: (counts[0], counts[1])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in (1, 2))])
@pytest.mark.parametrize(
    "system", [pytest.param(each, marks=SLOW if each in ("static", "orca") else ()) for each in SYSTEMS]
)
def test_every_system_gives_the_same_run(system: str, seed: int) -> None:
    model = pool_model("llama-3-8b", "h100-80gb", ONE_GPU)
    spec = arrange(system, fleet("llama-3-8b", "h100-80gb", ONE_GPU, 4), 2)
    options = RunOptions(seed=seed, slo=SLO(2.0, 0.05), trace=seed == 1)
    both(spec, {pool.name: model for pool in spec.pools}, LOAD.format(rate=4 + 8 * seed), seed, options)


@pytest.mark.parametrize("load", [pytest.param(MIXED, marks=SLOW), LONG])
@pytest.mark.parametrize(
    "spec",
    [
        split(2, 2, gateways=2),
        split(1, 2, engine=replace(ENGINE, kv_blocks=120, max_running=8)),
        colocated(2, engine=replace(ENGINE, kv_blocks=150, prefix_caching=False)),
        tiered(2),
    ],
    ids=["gateways", "few-blocks", "preemptions", "tiers"],
)
def test_every_shape_gives_the_same_run(spec: ClusterSpec, load: str) -> None:
    both(spec, models(spec), load, 5, RunOptions())
    both(spec, models(spec), load, 6, RunOptions(until_s=2.0))


async def _troubled(environment: Environment, seed: int) -> list[object]:
    """Requests that are moved, ended, cancelled and too late, parallel samples, and a worker that dies."""
    draw = random.Random(seed)
    spec = split(1, 3)
    seen: list[object] = []
    async with open_cluster(spec, models(spec), environment) as cluster:
        (dispatcher,) = cluster.dispatchers
        asks = [asyncio.ensure_future(_ask(dispatcher, index, draw.random(), seen)) for index in range(24)]
        for _ in range(12):
            await asyncio.sleep(draw.uniform(0.01, 0.2))
            name = f"w-{draw.randrange(24)}"
            moved = await dispatcher.move(name, f"decode-{draw.randrange(3)}") if draw.random() < 0.6 else None
            if moved is None:
                dispatcher.finish(name)
            stats = [(each.name, each.state, each.age_s, each.stats) for each in dispatcher.view.workers]
            seen.append((_now_s(), name, moved, stats, dispatcher.recent().traffic, dispatcher.oldest_requests(3)))
        asks[draw.randrange(24)].cancel()
        await cluster.runtime.handles["decode-1"].server.close()
        await asyncio.gather(*asks, return_exceptions=True)
        for worker in cluster.runtime.workers.values():
            seen.append(worker.engine.stats())
            worker.engine.check()
    return seen


async def _ask(dispatcher: Dispatcher, index: int, share: float, seen: list[object]) -> None:
    await asyncio.sleep(0.05 * index * share)
    answers: list[tuple[float, object]] = []

    def record(event: Event) -> None:
        if isinstance(event, Delta):
            times_s = event.token_s or (_now_s(),) * len(event.tokens)
            answers.extend(zip(times_s, event.tokens, strict=True))
        else:
            answers.append((_now_s(), event))

    prompt = tuple(range(1, 100 + 37 * (index // 4)))
    sampling = SamplingParams(seed=1, max_tokens=20 + round(200 * share))
    request = Request(f"w-{index}", prompt, sampling, group=f"group-{index // 4}" if index % 8 < 4 else "")
    try:
        await dispatcher.run(request, record, deadline_s=0.5 if index % 7 == 3 else None)
    except ClusterError as error:
        answers.append((_now_s(), repr(error)))
    finally:
        seen.append((index, answers))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 24))])
def test_faults_moves_and_looks_at_any_time_see_the_same(seed: int, num_steps: Callable[[], tuple[int, int]]) -> None:
    several = run_virtual(_troubled(SEVERAL, seed))
    assert num_steps()[0] > num_steps()[1], "most steps ran as one"
    single = run_virtual(_troubled(SINGLE, seed))
    for one, other in zip(several, single, strict=True):
        assert _nameless(one) == _nameless(other)


def _nameless(seen: object) -> str:
    """Without the random part of a gateway's name."""
    return re.sub(r"@gateway-0-\w{8}", "", repr(seen))


def test_steps_run_as_one_beside_a_router_that_reads_cache_events(num_steps: Callable[[], tuple[int, int]]) -> None:
    model = pool_model("llama-3-8b", "h100-80gb", ONE_GPU)
    spec = arrange("mooncake", fleet("llama-3-8b", "h100-80gb", ONE_GPU, 4), 2)
    simulate(spec, {pool.name: model for pool in spec.pools}, load_workload(LOAD.format(rate=4), seed=0))
    assert num_steps()[0] > 2 * num_steps()[1]
