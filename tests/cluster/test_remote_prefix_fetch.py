"""A prefix fetched from another worker's cache gives the same tokens as a computed one: a real model."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.open import SharedMemory
from tests.cluster.pairs import Legs, colocated, parallel_worker, words
from tests.model.tiny import write_tiny_llama
from workers.config import EngineConfig, ParallelConfig
from workers.request import Request, SamplingParams
from workers.worker import Worker

ENGINE = EngineConfig(block_size=8, kv_blocks=96, max_batch_tokens=24, max_running=8)
OTHER = replace(ENGINE, block_size=12)
PROMPT = tuple(3 + 11 * position % 300 for position in range(70))  # eight blocks of 8 tokens, five of 12, and some


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("models") / "nine-heads"
    return str(
        write_tiny_llama(folder, num_layers=3, hidden_size=72, ffn_size=100, num_heads=9, num_kv_heads=3, head_dim=8)
    )


async def ended(worker: Worker) -> None:
    """Its fetches have."""
    async with asyncio.timeout(30.0):
        while len(worker.engine.prefix_fetches):
            await asyncio.sleep(0.001)


PAIRS = pytest.mark.parametrize(
    ("owner", "reader", "engine"),
    [((1, 1), (1, 1), ENGINE), ((3, 1), (1, 2), ENGINE), ((1, 2), (3, 1), OTHER)],
    ids=["alike", "other parallel settings", "other blocks too"],
)


@pytest.mark.parametrize("backend", ["tcp", "memory"])
@PAIRS
async def test_a_fetched_prefix_gives_the_same_tokens(
    model: str, owner: tuple[int, int], reader: tuple[int, int], engine: EngineConfig, backend: str
) -> None:
    shared = SharedMemory()
    settings = (("owner", owner, ENGINE), ("reader", reader, engine), ("decode", (1, 1), ENGINE))
    workers = [
        await parallel_worker(name, model, ParallelConfig(*each), sizes, shared, (backend,), prefix_tokens=24)
        for name, each, sizes in settings
    ]
    try:
        holder, taker, decode = workers
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=9, ignore_eos=True)
        (first,) = await Legs(holder, decode).run([Request("first", PROMPT, sampling)])
        longer = Request("longer", (*PROMPT, *range(5, 25)), sampling)
        (expected,) = await colocated(decode, [longer])

        ticket = await holder.hold_prefix(longer)
        assert ticket is not None and ticket.num_tokens == 64
        assert await taker.fetch_prefix(longer, ticket, 30.0) == 64, words(ParallelConfig(*owner))
        await ended(taker)
        before = taker.engine.stats().cached_blocks
        assert before == 64 // engine.block_size
        (moved,) = await Legs(taker, decode).run([longer])
        assert moved.tokens == expected and first.tokens
        assert (await taker.hold_prefix(replace(longer, id="again"))) is not None, (
            "what was fetched can be held for others"
        )
        for worker in workers:
            worker.engine.expire(float("inf"))
            await worker.check()
            stats = worker.engine.stats()
            assert stats.free_blocks == stats.total_blocks
    finally:
        for worker in workers:
            await worker.close()


@PAIRS
async def test_an_answer_is_fetched_from_the_gang_that_generated_it(
    model: str, owner: tuple[int, int], reader: tuple[int, int], engine: EngineConfig
) -> None:
    """Nobody has read it before, so all ranks of the idle owner digest it first."""
    shared = SharedMemory()
    settings = (("owner", owner, ENGINE), ("reader", reader, engine))
    holder, taker = workers = [
        await parallel_worker(name, model, ParallelConfig(*each), sizes, shared, ("memory",), prefix_tokens=24)
        for name, each, sizes in settings
    ]
    try:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=9, ignore_eos=True)
        (answer,) = await colocated(holder, [Request("first", PROMPT, sampling)])
        turn = Request("second", (*PROMPT, *answer, 5, 6, 7), sampling)
        (expected,) = await colocated(taker, [turn])
        await taker.check()
        taker.engine.pool.clear_cache()
        ticket = await holder.hold_prefix(turn)
        assert ticket is not None and ticket.num_tokens == 72, "79 tokens, of which the last has no KV"
        assert await taker.fetch_prefix(turn, ticket, 30.0) == 72
        await ended(taker)
        (tokens,) = await colocated(taker, [replace(turn, id="again")])
        assert tokens == expected
        assert taker.engine.pool.hits.tokens == {"fetched": 72}, "whole blocks of 8 or 12 tokens"
        assert holder.engine.leases.lent_tokens.total() == 72
        for worker in workers:
            await worker.check()
            assert worker.engine.stats().free_blocks == worker.engine.stats().total_blocks
    finally:
        for worker in workers:
            await worker.close()
