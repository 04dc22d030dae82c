"""A gang answers as one rank does, says which rank failed and why, and leaves nothing behind."""

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.open import SharedMemory
from tests.model.tiny import write_tiny_llama
from workers.config import EngineConfig, ParallelConfig, TransferConfig, WorkerConfig
from workers.engine.step import Chunk, Draw, StepPlan
from workers.errors import ModelError, RankLost
from workers.executor.gang import GangExecutor, open_gang
from workers.executor.order import RankOrder
from workers.executor.rank_server import RankTasks, serve_rank
from workers.executor.solo import open_solo
from workers.model.folder import ModelFolder
from workers.request import SamplingParams

PROMPT = tuple(range(10, 31))
BLOCKS = (4, 2, 9)
SCORED = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("gang") / "model"
    return ModelFolder(str(path), write_tiny_llama(path, num_layers=3, hidden_size=72, num_heads=9, num_kv_heads=3))


def config(tensor: int, pipeline: int, **engine: object) -> WorkerConfig:
    sizes = EngineConfig(**{"block_size": 8, "kv_blocks": 16, "max_batch_tokens": 64, "threads": 1, **engine})
    parallel = ParallelConfig(tensor, pipeline)
    transfer = TransferConfig(backends=("memory",), host="127.0.0.1")
    return WorkerConfig("w", "pool", "tiny", sizes, parallel, transfer, secret="of the test")


async def open_tasks(folder: ModelFolder, tensor: int, pipeline: int, **engine: object) -> GangExecutor:
    shared = SharedMemory()
    launcher = RankTasks(lambda _: folder, shared)
    return await open_gang(config(tensor, pipeline, **engine), folder, "w-1", launcher, shared)


def plans() -> list[StepPlan]:
    """A prompt in two chunks, scored, beside another; then a decode of both."""
    first = Chunk("a/0", PROMPT[:9], 0, BLOCKS[:2], None, targets=PROMPT[1:10], num_top=1)
    rest = Chunk("a/0", PROMPT[9:], 9, BLOCKS, Draw(SCORED, 0, 21), targets=PROMPT[10:], num_top=1)
    other = Chunk("b/0", PROMPT[5:12], 0, (7,), Draw(replace(SCORED, temperature=0.9, seed=5), 5, 7))
    return [
        StepPlan(1, (first,)),
        StepPlan(2, (rest, other)),
        StepPlan(3, (Chunk("a/0", (5,), 21, BLOCKS, Draw(SCORED, 0, 22)),), copies=((7, 6),)),
    ]


def close_to(found: object, expected: object) -> bool:
    """Equal but for the last digits of floats."""
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) < 1e-4
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return len(found) == len(expected) and all(map(close_to, found, expected))
    return found == expected


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (5, 1)])
async def test_a_gang_gives_the_results_of_one_rank(nine_heads: ModelFolder, tensor: int, pipeline: int) -> None:
    solo = await open_solo(config(1, 1), nine_heads, "s-1", SharedMemory())
    gang = await open_tasks(nine_heads, tensor, pipeline)
    assert gang.depth == pipeline and gang.facts == solo.facts
    shards = gang.shards()
    assert [shard.rank for shard in shards] == list(range(tensor * pipeline))
    # All plans at once: each rank takes them in order, the stages of a pipeline at the same time.
    expected = [await solo.execute(plan) for plan in plans()]
    found = await asyncio.gather(*(gang.execute(plan) for plan in plans()))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens and ours.number == theirs.number
        for each, wanted in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (each is None) == (wanted is None)
            assert each is None or wanted is None or close_to((each.chosen, each.top), (wanted.chosen, wanted.top))
        scores = [[one.chosen for one in chunk] for chunk in ours.prompt_logprobs]
        assert scores == [[pytest.approx(one.chosen, abs=1e-4) for one in chunk] for chunk in theirs.prompt_logprobs]
    assert 0.0 <= gang.bubble_share < 1.0
    await gang.close()
    await solo.close()


async def test_a_setting_that_the_model_cannot_fill_is_refused_before_anything_starts(nine_heads: ModelFolder) -> None:
    class Nobody:
        def launch(self, orders: Sequence[RankOrder]) -> Sequence[Awaitable[object]]:
            raise AssertionError("ranks were started")

        async def end(self) -> None:
            """There is nobody."""

    for tensor, pipeline, reason in ((1, 4, "3 layers"), (10, 1, "9 attention heads")):
        with pytest.raises(ModelError, match=reason):
            await open_gang(config(tensor, pipeline), nine_heads, "w-1", Nobody())


async def test_a_rank_that_cannot_open_is_named_and_nothing_is_left(nine_heads: ModelFolder, tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        broken = ModelFolder("broken", write_tiny_llama(tmp_path / "m", num_layers=3, num_heads=9, num_kv_heads=3))
        (broken.path / "model.safetensors").write_bytes(b"damaged")
        shared = SharedMemory()
        with pytest.raises(ModelError, match=r"rank 1: .*truncated"):
            await open_gang(config(1, 2), nine_heads, "w-1", RankTasks(lambda _: broken, shared), shared)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("w")]


class Doomed(RankTasks):
    """Ranks that a test can end at will."""

    def kill(self, index: int) -> None:
        self._tasks[index].cancel()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a step"])
async def test_a_lost_rank_fails_the_gang(nine_heads: ModelFolder, busy: bool) -> None:
    shared = SharedMemory()
    launcher = Doomed(lambda _: nine_heads, shared)
    gang = await open_gang(config(1, 3), nine_heads, "w-1", launcher, shared)
    steps = [asyncio.ensure_future(gang.execute(plan)) for plan in plans()] if busy else []
    launcher.kill(0)
    async with asyncio.timeout(10):
        error = await gang.failure()
    assert isinstance(error, RankLost) and "rank 1" in str(error)
    with pytest.raises(RankLost):
        await gang.execute(plans()[0])
    async with asyncio.timeout(20):
        await asyncio.gather(*steps, return_exceptions=True)
        await gang.close()


async def test_a_caller_without_the_secret_is_turned_away(nine_heads: ModelFolder) -> None:
    """A stranger who calls first takes no seat: the real rank gets it, and the stranger is told nothing."""

    class Intruded(RankTasks):
        def launch(self, orders: Sequence[RankOrder]) -> Sequence[Awaitable[object]]:
            strange = replace(orders[0], config=replace(orders[0].config, secret="guessed"))
            self.stranger = asyncio.ensure_future(serve_rank(strange, lambda _: nine_heads))
            return super().launch(orders)

    shared = SharedMemory()
    launcher = Intruded(lambda _: nine_heads, shared)
    gang = await open_gang(config(2, 1), nine_heads, "w-1", launcher, shared)
    async with asyncio.timeout(10):
        await launcher.stranger
    assert (await gang.execute(plans()[0])).number == 1
    await gang.close()
