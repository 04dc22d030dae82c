"""A worker times steps without a request: it releases what it used, requests come first, invalid shapes are refused."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.outputs_reader import OutputsReader
from diptych.shapes import Shape
from kvtransfer.open import RESERVED_BLOCKS, SharedMemory
from workers.build import build_worker
from workers.config import ByteSize, CacheConfig, EngineConfig, ParallelConfig, TransferConfig, WorkerConfig
from workers.costs import LinearCost, step_seconds
from workers.engine.estimate import plan_seconds
from workers.engine.executor import Executor
from workers.engine.step import StepPlan, StepResult
from workers.engine.step_timing import num_blocks, step_plan
from workers.errors import InvalidRequest, Overloaded, WorkerClosed
from workers.executor.gang import open_gang
from workers.executor.rank_loader import open_solo
from workers.executor.rank_server import RankTasks
from workers.executor.simulated import open_simulated, simulated_facts
from workers.model.folder import ModelFolder
from workers.request import Request, SamplingParams
from workers.server import ExecutorFactory, WorkerServer
from workers.worker import Worker

COST = LinearCost(1e-4, 1e-5, 1e-8, 2e-5, 1e-7)
SHAPES = (
    Shape(((16, 0),)),
    Shape(((8, 40), (5, 0))),
    Shape((), 4, 30),
    Shape(((16, 16),), 3, 20),
    Shape(((16, 0),), 1, 9, swap_bytes=1),
)


def request(name: str, length: int, max_tokens: int = 8) -> Request:
    return Request(name, tuple(range(1, length + 1)), SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens))


def config(executor: str = "simulated", parallel: ParallelConfig | None = None, **engine: object) -> WorkerConfig:
    sizes = {"block_size": 8, "kv_blocks": 66, "max_batch_tokens": 32, "max_running": 8, "threads": 1}
    return WorkerConfig(
        "w-0",
        "w",
        "tiny",
        EngineConfig(**(sizes | engine)),  # type: ignore[arg-type]
        parallel or ParallelConfig(),
        TransferConfig(backends=("memory",), host="127.0.0.1"),
        executor,
        secret="of the test",
        cache=CacheConfig(ByteSize(1_500_000)),
    )


@asynccontextmanager
async def simulated(cost: LinearCost = COST, **engine: Any) -> AsyncIterator[Worker]:
    async with running(build_worker(config(**engine), shared=SharedMemory(), cost=cost)) as worker:
        yield worker


@asynccontextmanager
async def running(server: WorkerServer) -> AsyncIterator[Worker]:
    worker = await server.open()
    try:
        yield worker
        stats = worker.engine.stats()
        assert stats.free_blocks == stats.total_blocks, stats
        worker.engine.check()
    finally:
        await worker.close()


def real(folder: ModelFolder, tensor: int, pipeline: int) -> WorkerServer:
    shared = SharedMemory()

    async def open_it(config: WorkerConfig, incarnation: str) -> Executor:
        if tensor * pipeline == 1:
            return await open_solo(config, folder, incarnation, shared)
        return await open_gang(config, folder, incarnation, RankTasks(lambda _: folder, shared), shared)

    return WorkerServer(config("torch", ParallelConfig(tensor, pipeline)), open_it)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
async def test_steps_of_every_shape_are_timed_and_their_blocks_come_back(
    tiny: ModelFolder, tensor: int, pipeline: int
) -> None:
    async with running(real(tiny, tensor, pipeline)) as worker:
        for shape in SHAPES:
            timings = await worker.measure(shape, 2)
            assert len(timings.seconds) == 2 and 0.0 < sum(timings.seconds) <= timings.elapsed_s
            assert worker.engine.stats().free_blocks == worker.engine.stats().total_blocks


async def test_a_simulated_worker_tells_what_its_cost_model_says() -> None:
    async with simulated() as worker:
        for shape in SHAPES[:-1]:
            (seconds,) = (await worker.measure(shape, 1)).seconds
            assert seconds == pytest.approx(step_seconds(shape, COST))


async def test_a_worker_with_work_is_not_measured() -> None:
    async with simulated(LinearCost(0.05, 0.0, 0.0, 0.0, 0.0)) as worker:
        reader = await OutputsReader.open(worker, "")
        await worker.generate(request("busy", 20, max_tokens=8))
        with pytest.raises(Overloaded, match="idle"):
            await worker.measure(SHAPES[0], 1)
        await worker.cancel("busy/0")
        async with asyncio.timeout(30.0):
            while worker.engine.has_work:
                await asyncio.sleep(0.005)
        assert (await worker.measure(SHAPES[0], 1)).seconds
        await reader.close()


async def test_two_measurements_do_not_share_a_worker() -> None:
    async with simulated(LinearCost(0.05, 0.0, 0.0, 0.0, 0.0)) as worker:
        first = asyncio.ensure_future(worker.measure(SHAPES[0], 2))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await worker.measure(SHAPES[1], 1)
        assert len((await first).seconds) == 2


async def test_a_request_ends_the_measurement_and_gets_the_blocks() -> None:
    async with simulated(LinearCost(0.02, 0.0, 0.0, 0.0, 0.0), kv_blocks=RESERVED_BLOCKS + 8) as worker:
        whole = Shape(((32, 32),))  # all blocks there are
        measuring = asyncio.ensure_future(worker.measure(whole, 256))
        async with asyncio.timeout(30.0):
            while not worker.engine.stats().quarantined_blocks:
                await asyncio.sleep(0)
        reader = await OutputsReader.open(worker, "")
        reservation = await worker.reserve(request("comes", 20), timeout_s=5.0)
        assert reservation.num_blocks == 3
        assert len((await measuring).seconds) < 256
        await worker.cancel("comes/0")
        await reader.close()


async def test_who_asks_may_leave_in_the_middle() -> None:
    async with simulated(LinearCost(0.02, 0.0, 0.0, 0.0, 0.0)) as worker:
        measuring = asyncio.ensure_future(worker.measure(SHAPES[0], 3))
        await asyncio.sleep(0.01)
        measuring.cancel()
        await asyncio.wait([measuring])
        assert worker.engine.stats().free_blocks < worker.engine.stats().total_blocks  # the step goes on
        async with asyncio.timeout(30.0):
            while worker.engine.stats().quarantined_blocks:
                await asyncio.sleep(0.005)


async def test_closing_waits_for_the_step_and_begins_no_other() -> None:
    server = build_worker(config(), shared=SharedMemory(), cost=LinearCost(0.02, 0.0, 0.0, 0.0, 0.0))
    worker = await server.open()
    measuring = asyncio.ensure_future(worker.measure(SHAPES[0], 256))
    await asyncio.sleep(0.01)
    await worker.close()
    assert len((await measuring).seconds) < 256
    worker.engine.check()
    with pytest.raises(WorkerClosed):
        await worker.measure(SHAPES[0], 1)


@pytest.mark.parametrize(
    ("shape", "repeats", "what"),
    [
        (Shape(), 1, "tokens in the step"),
        (Shape(((33, 0),)), 1, "tokens in the step"),
        (Shape(((0, 8),), 2, 4), 1, "chunk"),
        (Shape((), 9, 4), 1, "decodes"),
        (Shape((), 2, 0), 1, "behind a decode"),
        (Shape((), 8, 400), 1, "blocks"),
        (Shape(((8, 5000),)), 1, "before a chunk"),
        (Shape((), 1, 4, swap_bytes=1 << 40), 1, "swapped"),
        (Shape((), 1, 4), 0, "repeats"),
        (Shape((), 1, 4), 1 << 20, "repeats"),
    ],
)
async def test_what_no_step_can_be_is_refused(shape: Shape, repeats: int, what: str) -> None:
    async with simulated() as worker:
        with pytest.raises(InvalidRequest, match=what):
            await worker.measure(shape, repeats)


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError(), ValueError("no"), TypeError("no")])
async def test_an_error_in_a_measurement_is_its_callers_and_the_worker_goes_on(error: Exception) -> None:
    async with running(WorkerServer(config(), failing(error, 1))) as worker:
        with pytest.raises(type(error)):
            await worker.measure(SHAPES[0], 1)
        assert (await worker.measure(SHAPES[0], 1)).seconds


@pytest.mark.parametrize(
    "shape",
    [
        Shape((), 4_000_000_000, 4_000_000_000),
        Shape((), 1, 4_000_000_000),
        Shape(((4_000_000_000, 4_000_000_000),)),
        Shape(((1, 0),) * 100_000),
        Shape((), 1, 4, swap_bytes=2**63),
    ],
)
async def test_a_measurement_of_any_size_asked_for_is_refused_at_once(shape: Shape) -> None:
    async with simulated() as worker:
        with pytest.raises(InvalidRequest):
            await worker.measure(shape, 1)


def failing(error: Exception, times: int) -> ExecutorFactory:
    async def open_it(config: WorkerConfig, incarnation: str) -> Executor:
        executor = open_simulated(config, simulated_facts(8), COST, incarnation, SharedMemory())
        well, left = executor.execute, iter(range(times))

        async def execute(plan: StepPlan) -> StepResult:
            if next(left, None) is not None:
                raise error
            return await well(plan)

        executor.execute = execute
        return executor

    return open_it


shapes = st.builds(
    Shape,
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=3).map(tuple),
    st.integers(0, 5),
    st.integers(1, 70),
)


@given(shapes, st.integers(1, 20), st.integers(0, 4))
def test_a_plan_costs_what_its_shape_says_and_no_block_is_in_it_twice(
    shape: Shape, block_size: int, swaps: int
) -> None:
    blocks = range(3, 3 + num_blocks(shape, block_size, swaps))
    plan = step_plan(shape, blocks, block_size, 500, range(swaps))
    # A chunk of one token that draws is a decode, wherever it stands.
    lone = any(tokens == 1 for tokens, _ in shape.chunks)
    assert lone or plan_seconds(COST, plan) == pytest.approx(step_seconds(shape, COST))
    taken: Sequence[int] = [
        *(block for chunk in plan.chunks for block in chunk.blocks),
        *(block for block, _ in plan.swap_out),
        *(block for _, block in plan.swap_in),
    ]
    assert sorted(taken) == list(blocks)
    assert all(0 <= token < 500 for chunk in plan.chunks for token in chunk.tokens)
    assert all(len(chunk.blocks) == -(-chunk.context // block_size) for chunk in plan.chunks)
