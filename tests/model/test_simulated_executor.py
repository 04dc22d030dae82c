import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from cluster.offline.sim.clock import run
from kvtransfer.digest import combine
from kvtransfer.errors import PeerLost
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import PeerAddress, Piece
from kvtransfer.transport import PullOrder
from workers.config import EngineConfig, ParallelConfig, TransferConfig, WorkerConfig
from workers.costs import CostModel, LinearCost
from workers.engine.engine import Engine, EngineOutput
from workers.engine.engine_loop import EngineLoop
from workers.engine.estimate import plan_seconds
from workers.engine.executor import RemoteAttend, SpanQuery
from workers.engine.step import ELSEWHERE, Chunk, Draw, RemoteKV, StepPlan, StepResult
from workers.executor.simulated import SimulatedExecutor, open_simulated, simulated_facts, simulated_token
from workers.executor.simulated_lending import SMOLLM2_CALLS
from workers.request import Request, SamplingParams, TokensOut

T = TypeVar("T")
COST = LinearCost()
DRAW = Draw(SamplingParams(), seed=1, position=10)


def run_virtually(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result and the virtual seconds it took."""

    async def timed() -> tuple[T, float]:
        return await main, asyncio.get_running_loop().time()

    return run(timed())


def open_one(
    name: str,
    backend: str,
    shared: SharedMemory | None = None,
    *,
    stages: int = 1,
    kv_blocks: int = 16,
    cost: CostModel = COST,
) -> SimulatedExecutor:
    config = WorkerConfig(
        name,
        "pool",
        "simulated",
        EngineConfig(kv_blocks=kv_blocks, block_size=4, max_batch_tokens=64),
        ParallelConfig(pipeline=stages),
        transfer=TransferConfig(backends=(backend,), host="127.0.0.1"),
        executor="simulated",
        secret="s",
    )
    return open_simulated(config, simulated_facts(block_size=4), cost, f"{name}-1", shared)


def plan(tokens: tuple[int, ...] = tuple(range(10)), blocks: tuple[int, ...] = (3, 4, 5)) -> StepPlan:
    return StepPlan(1, (Chunk("a/0", tokens, 0, blocks, DRAW),), digest_blocks=slots(blocks))


def slots(blocks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ten tokens in blocks of four."""
    return tuple(zip(blocks, (4, 4, 2), strict=True))


def order(owner: SimulatedExecutor, digests: tuple[tuple[bytes, ...], ...], targets: tuple[int, ...]) -> PullOrder:
    layout = owner.facts.layout
    piece = Piece(0, layout.heads, layout.layers)
    checks = ((piece, combine(digests[0], layout, piece)),)
    return PullOrder("owner-1", (3, 4, 5), targets, 0, 10, checks, 5.0)


def test_a_step_takes_what_the_cost_model_says_and_no_real_time() -> None:
    async def main() -> Any:
        executor = open_one("w", "simulated")
        before = threading.active_count()
        result = await executor.execute(plan())
        assert threading.active_count() == before
        await executor.close()
        return result

    result, seconds = run_virtually(main())
    assert seconds == pytest.approx(COST.prefill_seconds(10)) == result.seconds
    assert result.tokens == (simulated_token("a/0", 10, 1000, (0,)),)


def test_swapped_blocks_take_their_time_each_way() -> None:
    async def main() -> Any:
        executor = open_one("w", "simulated", cost=LinearCost(swap_byte_s=1e-6))
        swapping = StepPlan(1, plan().chunks, swap_out=((6, 0), (7, 1)), swap_in=((2, 8),))
        result = await executor.execute(swapping)
        await executor.close()
        return result

    result, seconds = run_virtually(main())
    num_bytes = 3 * simulated_facts(block_size=4).layout.block_bytes
    assert seconds == pytest.approx(COST.prefill_seconds(10) + num_bytes * 1e-6) == result.seconds


def test_a_pull_takes_simulated_time_on_the_virtual_clock() -> None:
    async def main() -> float:
        owner, reader = open_one("owner", "simulated"), open_one("reader", "simulated")
        digests = (await owner.execute(plan())).digests
        await reader.connect(PeerAddress("owner", "owner-1", "h", 0, owner.shards()))
        begun = asyncio.get_running_loop().time()
        await reader.pull(order(owner, digests, (6, 7, 8))).done
        return asyncio.get_running_loop().time() - begun

    num_bytes = 3 * simulated_facts(block_size=4).layout.block_bytes
    seconds, _ = run_virtually(main())
    assert seconds == pytest.approx(COST.transfer_seconds(num_bytes))


@pytest.mark.parametrize("backend", ["memory", "tcp"])
async def test_pulled_patterns_match_their_digests(backend: str) -> None:
    shared = SharedMemory()
    owner, reader = open_one("owner", backend, shared), open_one("reader", backend, shared)
    digests = (await owner.execute(plan())).digests
    await reader.connect(PeerAddress("owner", "owner-1", "127.0.0.1", 0, owner.shards()))
    read = reader.pull(order(owner, digests, (9, 8, 7)))
    await read.done
    await read.settled
    assert (await reader.execute(StepPlan(2, (), digest_blocks=slots((9, 8, 7))))).digests == digests
    await reader.close()
    await owner.close()


async def test_digests_follow_tokens_and_positions() -> None:
    executor = open_one("w", "memory", SharedMemory())
    first = (await executor.execute(plan())).digests[0]
    again = (await executor.execute(plan(blocks=(6, 7, 8)))).digests[0]
    other = (await executor.execute(plan((99, *range(1, 10)), blocks=(9, 10, 11)))).digests[0]
    assert first == again
    assert first[0] != other[0] and first[1:] == other[1:]
    assert len(set(first)) == 3
    await executor.close()


def test_tokens_survive_an_attempt_and_pass_over_what_is_barred() -> None:
    token = simulated_token("request/0", 17, 1000)
    assert simulated_token("request/3", 17, 1000) == token
    assert simulated_token("request/0", 17, 1000, (token, token + 1)) == token + 2
    assert len({simulated_token("request/0", position, 1000) for position in range(100)}) == 100


def test_a_mixed_step_costs_its_parts() -> None:
    decode = Chunk("b/0", (1,), 99, tuple(range(25)), DRAW)
    chunk = Chunk("a/0", (1, 2), 8, (3, 4, 5), None)
    mixed = plan_seconds(COST, StepPlan(1, (decode, chunk)))
    parts = COST.decode_seconds(1, 100) + COST.prefill_seconds(2, 8)
    assert mixed == pytest.approx(parts - COST.step_s)


def test_costs_grow_with_the_work_and_invalid_ones_are_refused() -> None:
    assert COST.prefill_seconds(100, 50) > COST.prefill_seconds(100) > COST.prefill_seconds(50)
    whole = COST.prefill_seconds(100)
    halves = COST.prefill_seconds(50) + COST.prefill_seconds(50, 50)
    assert halves - whole == pytest.approx(COST.step_s)
    assert COST.decode_seconds(4, 400) > COST.decode_seconds(4, 100) > COST.decode_seconds(1, 100)
    assert COST.transfer_seconds(10**9) == pytest.approx(COST.transfer_latency_s + 10**9 * COST.transfer_byte_s)
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"cost\.step_s"):
            LinearCost(step_s=value)


# ---- stages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_plans_pass_the_stages_in_their_order_each_stage_on_one_at_a_time(stages: int) -> None:
    ended: list[int] = []

    async def main() -> float:
        executor = open_one("w", "simulated", stages=stages)
        plans = [StepPlan(number, plan().chunks) for number in range(1, 9)]
        running = [asyncio.ensure_future(executor.execute(each)) for each in plans]
        for each in running:
            each.add_done_callback(lambda task: ended.append(task.result().number))
        results = await asyncio.gather(*running)
        assert {result.seconds for result in results} == {plan_seconds(COST, plans[0])}
        return executor.bubble_share

    share, seconds = run_virtually(main())
    assert seconds == pytest.approx((8 + stages - 1) / stages * COST.prefill_seconds(10))
    assert ended == list(range(1, 9))
    assert share == pytest.approx((stages - 1) / (8 + stages - 1))


def test_plans_without_any_cost_still_end_in_their_order() -> None:
    ended: list[int] = []

    async def main() -> None:
        executor = open_one("w", "simulated", stages=3, cost=LinearCost(0.0, 0.0, 0.0, 0.0, 0.0))
        running = [asyncio.ensure_future(executor.execute(StepPlan(number, plan().chunks))) for number in range(9)]
        for each in running:
            each.add_done_callback(lambda task: ended.append(task.result().number))
        await asyncio.wait(running)

    run_virtually(main())
    assert ended == list(range(9))


def serve(stages: int, count: int, cost: CostModel) -> tuple[float, float]:
    """Virtual seconds for `count` prompts of 40 tokens with answers of 32 through engine and pump, and the bubble."""

    async def main() -> float:
        executor = open_one("w", "simulated", stages=stages, kv_blocks=400, cost=cost)
        loop, open_answers, ended = asyncio.get_running_loop(), count, asyncio.Event()

        def deliver(outputs: list[EngineOutput]) -> None:
            nonlocal open_answers
            open_answers -= sum(isinstance(each, TokensOut) and each.finish is not None for each in outputs)
            if not open_answers:
                ended.set()

        engine = Engine(
            EngineConfig(kv_blocks=400, block_size=4, max_batch_tokens=64),
            executor.facts,
            cost=cost,
            depth=executor.depth,
        )
        for index in range(count):
            sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=32)
            engine.add(Request(f"r{index}", tuple(range(index, index + 40)), sampling, reply_to="t"), 0.0, hold=False)
        pump = EngineLoop(engine, executor, deliver, loop.time)
        pumping = asyncio.ensure_future(pump.run())
        await ended.wait()
        pump.stop()
        await pumping
        engine.check()
        return executor.bubble_share

    share, seconds = run_virtually(main())
    return seconds, share


def test_with_enough_sequences_stages_multiply_the_throughput() -> None:
    """Where a step's fixed cost is small. One decode alone keeps one stage of four busy at a time."""
    cost = LinearCost(step_s=1e-4)
    (alone_s, alone_share), (few_s, few_share), (many_s, many_share) = (serve(4, count, cost) for count in (1, 4, 16))
    assert serve(1, 16, cost)[0] / many_s > 3.4
    assert serve(1, 4, cost)[0] / few_s > 2.9
    assert alone_share == pytest.approx(0.7, abs=0.05)
    assert few_share < 0.25 and many_share < 0.13
    assert serve(1, 1, cost)[0] / alone_s > 1.2  # the prompt, in four parts
    assert serve(1, 16, cost)[1] == 0.0


def remote_plan(number: int, num_keys: int) -> StepPlan:
    """A decode that attends to this many keys, and 8 of its own."""
    blocks = (*[ELSEWHERE] * (num_keys // 4), 3, 4, 5)
    chunk = Chunk("a/0", (7,), num_keys + 8, blocks, DRAW, remote=(RemoteKV("lender-1", 1, num_keys // 4),))
    return StepPlan(number, (chunk,))


def test_a_step_waits_for_its_lender_in_each_layer() -> None:
    async def main() -> tuple[float, float]:
        borrower, lender = open_one("borrower", "simulated"), open_one("lender", "simulated")

        async def attend(span: RemoteKV, query: SpanQuery) -> bytes:
            return await lender.attend(tuple(range(span.num_blocks)), query)

        borrower.borrow(attend)
        results = [await borrower.execute(remote_plan(number, num_keys)) for number, num_keys in ((1, 128), (2, 1024))]
        await borrower.close()
        await lender.close()
        return results[0].seconds, results[1].seconds

    (few_s, many_s), seconds = run_virtually(main())
    calls_s = SMOLLM2_CALLS.seconds(COST, 1)
    assert calls_s > 30 * COST.transfer_latency_s
    assert few_s == pytest.approx(COST.decode_seconds(1, 128 + 1) + calls_s)  # the other 8 keys: during the wait
    assert many_s == pytest.approx(COST.decode_seconds(1, 1024 + 1) + calls_s)
    assert seconds == pytest.approx(few_s + many_s)


def test_a_lender_attends_in_the_order_of_the_calls_and_its_steps_take_longer() -> None:
    keys = tuple(range(256))  # 1,024 tokens
    attention_s = 1024 * COST.decode_context_s

    async def main() -> tuple[float, float]:
        lender = open_one("lender", "simulated")
        step = asyncio.ensure_future(lender.execute(plan()))
        await asyncio.sleep(0)
        begun_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(lender.attend(keys, SpanQuery(0, (0, 1), 0, 1024, bytes(1))) for _ in range(3)))
        attended_s = asyncio.get_running_loop().time() - begun_s
        await step
        result = await lender.execute(plan())
        await lender.attend(keys, SpanQuery(0, (0, 1), 0, 1024, bytes(1)))  # idle: no step is delayed
        assert (await lender.execute(plan())).seconds == pytest.approx(plan_seconds(COST, plan()))
        await lender.close()
        return attended_s, result.seconds

    (attended_s, step_s), _ = run_virtually(main())
    assert attended_s == pytest.approx(3 * attention_s)
    assert step_s == pytest.approx(plan_seconds(COST, plan()) + 3 * attention_s)


def test_a_lender_that_is_lost_loses_the_chunk_and_no_other() -> None:
    async def lost(span: RemoteKV, query: SpanQuery) -> bytes:
        raise PeerLost("gone")

    async def silent(span: RemoteKV, query: SpanQuery) -> bytes:
        await asyncio.sleep(1e9)
        return b""

    async def main(attend: RemoteAttend) -> StepResult:
        executor = open_one("w", "simulated")
        executor.borrow(attend)
        chunks = (*remote_plan(1, 128).chunks, Chunk("b/0", (1,), 9, (6, 7, 8), DRAW))
        result = await executor.execute(StepPlan(1, chunks))
        await executor.close()
        return result

    for attend in (lost, silent):
        result, _ = run_virtually(main(attend))
        assert result.lost == (0,) and result.tokens[0] is None and result.tokens[1] is not None
