"""Workers of several ranks, each rank a process, borrow and lend: the tokens and bits of one large worker."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.events import Delta, Event
from cluster.runtime.interface import WorkerOrder
from cluster.spec import PoolSpec, Role
from kvtransfer.open import SharedMemory
from tests.cluster.local import Cluster, cluster, completed, mixed_spec, tokens_of
from tests.model.rank_processes import ProcessRanks
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import EngineConfig, ParallelConfig
from workers.model.folder import ModelFolder
from workers.request import Request, SamplingParams, TokenLogprobs
from workers.server import WorkerServer

LARGE, SMALL = 130, 58  # blocks of 8 tokens; a small worker holds 448
PROMPT = tuple(3 + 11 * position % 300 for position in range(600))
SAMPLING = SamplingParams(temperature=4.0, seed=7, max_tokens=40, ignore_eos=True, logprobs=3)
ONE, TP2, PP2, BOTH = (ParallelConfig(*each) for each in ((1, 1), (2, 1), (1, 2), (2, 2)))
names = ["-".join(f"{each.tensor}x{each.pipeline}" for each in pair) for pair in ((TP2,), (PP2,), (BOTH,))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """9 query and 3 KV heads, and 3 layers: ranks are unlike."""
    path = tmp_path_factory.mktemp("models") / "nine-heads"
    write_tiny_llama(path, num_layers=3, hidden_size=72, num_heads=9, num_kv_heads=3, context_length=1024)
    return ModelFolder(str(path), path)


@pytest.fixture(scope="module")
def alone(model: ModelFolder) -> list[int]:
    """The tokens from one worker of one rank that holds all of it."""
    return tokens_of(asyncio.run(answer(model, LARGE, ONE)))


async def answer(model: ModelFolder, kv_blocks: int, *workers: ParallelConfig) -> list[Event]:
    async with opened(model, kv_blocks, *workers) as (subject, _):
        events = await subject.run(Request("long", PROMPT, SAMPLING))
        assert completed(events).attempts == 1
        await subject.settle()
        if kv_blocks == SMALL:
            assert sum(each._stats().pulls.arrived for each in subject.workers.values()) > 0
        return events


@asynccontextmanager
async def opened(
    model: ModelFolder, kv_blocks: int, *workers: ParallelConfig
) -> AsyncIterator[tuple[Cluster, dict[str, ProcessRanks]]]:
    engine = EngineConfig(block_size=8, kv_blocks=kv_blocks, max_batch_tokens=64, max_running=16, threads=1)
    spec = mixed_spec(backends=("tcp",))
    pools = tuple(PoolSpec(f"p{n}", Role.MIXED, engine=engine, parallel=each) for n, each in enumerate(workers))
    spec = replace(spec, model=str(model.path), executor="torch", pools=pools)
    launchers: dict[str, ProcessRanks] = {}

    def build(order: WorkerOrder) -> WorkerServer:
        launcher = launchers[order.config.name] = ProcessRanks(model)
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=SharedMemory(), launcher=launcher)

    async with cluster(spec, build=build) as subject:
        yield subject, launchers


def logprobs_of(events: list[Event]) -> list[TokenLogprobs]:
    return [each for event in events if isinstance(event, Delta) for each in event.logprobs]


@pytest.mark.grid
@pytest.mark.parametrize("parallel", [TP2, PP2, BOTH], ids=names)
async def test_gangs_lend_to_gangs(model: ModelFolder, alone: list[int], parallel: ParallelConfig) -> None:
    """The tokens of one rank, and the bits of one large gang."""
    large, small = await answer(model, LARGE, parallel), await answer(model, SMALL, parallel, parallel)
    assert tokens_of(small) == alone and len(alone) == SAMPLING.max_tokens
    assert logprobs_of(small) == logprobs_of(large) and len(logprobs_of(small)) == len(alone)


@pytest.mark.parametrize(
    "workers",
    [(TP2, ONE, ONE), (ONE, TP2), (PP2, TP2), pytest.param((ParallelConfig(4, 1), BOTH), marks=pytest.mark.full)],
    ids=lambda workers: " ".join(f"{each.tensor}x{each.pipeline}" for each in workers),
)
async def test_workers_of_other_ranks_lend_too(
    model: ModelFolder, alone: list[int], workers: tuple[ParallelConfig, ...]
) -> None:
    assert tokens_of(await answer(model, SMALL, *workers)) == alone


async def test_others_are_served_meanwhile(model: ModelFolder, alone: list[int]) -> None:
    """Stages of a pipeline compute steps of the borrower and of others at the same time."""
    short = [Request(f"s{n}", PROMPT[n : n + 40], replace(SAMPLING, max_tokens=30)) for n in range(6)]
    async with opened(model, SMALL, BOTH, PP2, PP2) as (subject, _):
        asked = [Request("long", PROMPT, SAMPLING), *short]
        long, *answers = await asyncio.gather(*map(subject.run, asked))
        again = [tokens_of(await subject.run(replace(each, id=f"{each.id}-again"))) for each in short]
        assert tokens_of(long) == alone and completed(long).attempts == 1
        assert [tokens_of(each) for each in answers] == again
        await subject.settle()


@pytest.mark.parametrize(
    ("parallel", "how"),
    [(TP2, signal.SIGKILL), (PP2, signal.SIGKILL), pytest.param(BOTH, signal.SIGSTOP, marks=pytest.mark.full)],
    ids=["2x1", "1x2", "2x2 stopped"],
)
async def test_the_death_of_a_lenders_rank_costs_another_attempt(
    model: ModelFolder, parallel: ParallelConfig, how: signal.Signals
) -> None:
    request = Request("long", PROMPT[:480], SAMPLING)
    async with opened(model, LARGE, parallel) as (subject, _):
        expected = tokens_of(await subject.run(request))
    async with opened(model, SMALL, parallel, parallel, parallel) as (subject, launchers):
        running = await subject.begin(request, 5)
        (lender,) = [name for name, each in subject.workers.items() if len(each.engine.loans)]
        before = subject.workers[lender].incarnation
        *_, victim = launchers[lender].processes
        assert victim.pid is not None
        os.kill(victim.pid, how)
        events = await asyncio.wait_for(running, 30.0)
        assert tokens_of(events) == expected and completed(events).attempts == 2
        await subject.until(
            lambda view: any(each.name == lender and each.incarnation != before for each in view.workers)
        )


async def test_a_gang_gets_its_blocks_back_for_its_own_requests(
    model: ModelFolder, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of one rank lends instead: it reads the blocks from both ranks of the first lender."""
    monkeypatch.setattr("workers.transfer.kv_borrower.RENEW_S", 0.05)
    request = Request("long", PROMPT[:500], replace(SAMPLING, max_tokens=150))
    async with opened(model, LARGE, TP2) as (subject, _):
        expected = tokens_of(await subject.run(request))
    async with opened(model, SMALL, TP2, PP2, ONE) as (subject, _):
        running = await subject.begin(request, 5)
        (lender,) = [each for each in subject.workers.values() if len(each.engine.loans)]
        own = Request("own", tuple(7 + 5 * n % 300 for n in range(400)), SamplingParams(seed=1, max_tokens=1))
        assert own.num_tokens // 8 > lender.engine.pool.num_free
        assert await lender.warm(own, 0.0, 20.0) > 0
        assert lender.engine.loans.recalled == 1 and not len(lender.engine.loans) and not running.done()
        events = await running
        assert tokens_of(events) == expected and completed(events).attempts == 1
        await subject.settle()
