import asyncio
import selectors
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from kvtransfer.open import SharedMemory, host_identity
from kvtransfer.ticket import PeerAddress
from kvtransfer.transport import PullOrder
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.costs import CostModel
from workers.engine.estimate import plan_seconds
from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor.modelled import ModelledExecutor, modelled_facts, modelled_token, open_modelled
from workers.request import SamplingParams

T = TypeVar("T")
COST = CostModel()
DRAW = Draw(SamplingParams(), seed=1, position=10)


class JumpingSelector(selectors.SelectSelector):
    """Never waits: the clock jumps to the next timer instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "deadlock: nothing is left to wait for"
        self.now += timeout
        return super().select(0)


def run_virtually(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result and the virtual seconds it took."""
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main), selector.now
    finally:
        loop.close()


def open_one(name: str, backend: str, shared: SharedMemory | None = None) -> ModelledExecutor:
    config = WorkerConfig(
        name,
        "pool",
        "modelled",
        EngineConfig(kv_blocks=16, block_size=4, max_batch_tokens=64),
        transfer=TransferConfig(backends=(backend,), host="127.0.0.1"),
        executor="modelled",
        secret="s",
    )
    return open_modelled(config, modelled_facts(block_size=4), COST, f"{name}-1", shared)


def plan(tokens: tuple[int, ...] = tuple(range(10)), blocks: tuple[int, ...] = (3, 4, 5)) -> StepPlan:
    return StepPlan(1, (Chunk("a/0", tokens, 0, blocks, DRAW),), digest_blocks=blocks)


def test_a_step_takes_what_the_cost_model_says_and_no_real_time() -> None:
    async def main() -> Any:
        executor = open_one("w", "modelled")
        before = threading.active_count()
        result = await executor.execute(plan())
        assert threading.active_count() == before
        await executor.close()
        return result

    result, seconds = run_virtually(main())
    assert seconds == pytest.approx(COST.prefill_seconds(10)) == result.seconds
    assert result.tokens == (modelled_token("a/0", 10, 1000, (0,)),)


def test_a_pull_takes_modelled_time_on_the_virtual_clock() -> None:
    async def main() -> float:
        owner, reader = open_one("owner", "modelled"), open_one("reader", "modelled")
        digests = (await owner.execute(plan())).digests
        await reader.connect(PeerAddress("owner", "owner-1", "h", 0, host_identity(), owner.shards()))
        begun = asyncio.get_running_loop().time()
        await reader.pull(PullOrder("owner-1", (3, 4, 5), (6, 7, 8), digests, 5.0)).done
        return asyncio.get_running_loop().time() - begun

    num_bytes = 3 * modelled_facts(block_size=4).layout.block_bytes
    seconds, _ = run_virtually(main())
    assert seconds == pytest.approx(COST.transfer_seconds(num_bytes))


@pytest.mark.parametrize("backend", ["memory", "tcp"])
async def test_pulled_patterns_match_their_digests(backend: str) -> None:
    shared = SharedMemory()
    owner, reader = open_one("owner", backend, shared), open_one("reader", backend, shared)
    digests = (await owner.execute(plan())).digests
    await reader.connect(PeerAddress("owner", "owner-1", "127.0.0.1", 0, host_identity(), owner.shards()))
    read = reader.pull(PullOrder("owner-1", (3, 4, 5), (9, 8, 7), digests, 5.0))
    await read.done
    await read.settled
    assert (await reader.execute(StepPlan(2, (), digest_blocks=(9, 8, 7)))).digests == digests
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
    token = modelled_token("request/0", 17, 1000)
    assert modelled_token("request/3", 17, 1000) == token
    assert modelled_token("request/0", 17, 1000, (token, token + 1)) == token + 2
    assert len({modelled_token("request/0", position, 1000) for position in range(100)}) == 100


def test_a_mixed_step_costs_its_parts() -> None:
    decode = Chunk("b/0", (1,), 99, tuple(range(25)), DRAW)
    chunk = Chunk("a/0", (1, 2), 8, (3, 4, 5), None)
    mixed = plan_seconds(COST, StepPlan(1, (decode, chunk)))
    parts = COST.decode_seconds(1, 100) + COST.prefill_seconds(2, 8)
    assert mixed == pytest.approx(parts - COST.step_s)


def test_costs_grow_with_the_work_and_refuse_nonsense() -> None:
    assert COST.prefill_seconds(100, 50) > COST.prefill_seconds(100) > COST.prefill_seconds(50)
    whole = COST.prefill_seconds(100)
    halves = COST.prefill_seconds(50) + COST.prefill_seconds(50, 50)
    assert halves - whole == pytest.approx(COST.step_s)
    assert COST.decode_seconds(4, 400) > COST.decode_seconds(4, 100) > COST.decode_seconds(1, 100)
    assert COST.transfer_seconds(10**9) == pytest.approx(COST.transfer_latency_s + 10**9 * COST.transfer_byte_s)
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"cost\.step_s"):
            CostModel(step_s=value)
