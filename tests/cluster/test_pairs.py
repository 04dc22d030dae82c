"""Split output equals colocated output, token for token, for every pair of tensor and pipeline settings."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvtransfer.errors import PeerRefused
from kvtransfer.open import SharedMemory
from tests.cluster.pairs import PARALLEL, Legs, colocated, parallel_worker, words
from tests.model.families import write_family
from tests.model.tiny import write_tiny_llama
from workers.config import EngineConfig, ParallelConfig
from workers.request import Request, SamplingParams
from workers.worker import Worker

pytestmark = [pytest.mark.grid, pytest.mark.asyncio(loop_scope="module")]

# As SmolLM2: 9 query and 3 KV heads, tied embeddings, layers that no number of stages divides; several chunks a prompt.
ENGINE = EngineConfig(block_size=8, kv_blocks=96, max_batch_tokens=24, max_running=8)
OTHER = replace(ENGINE, block_size=12)
SEEDED = {"temperature": 3.0, "top_p": 0.98, "repetition_penalty": 1.1}
LENGTHS = (3, 8, 33, 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`make pairs MODEL=smollm2-135m` names a real one; it takes 12 GB of memory."""
    if name := os.environ.get("DIPTYCH_PAIRS_MODEL"):
        return name
    folder: Path = tmp_path_factory.mktemp("models") / "nine-heads"
    return str(
        write_tiny_llama(folder, num_layers=7, hidden_size=72, ffn_size=100, num_heads=9, num_kv_heads=3, head_dim=8)
    )


def requests() -> list[Request]:
    """Half greedy, half drawn from a seed; the last two share a prefix."""
    made = []
    for index, length in enumerate(LENGTHS):
        drawing: dict[str, Any] = {"temperature": 0.0} if index % 2 else SEEDED
        sampling = SamplingParams(seed=index, **drawing)
        prompt = tuple(3 + (7 * index * (position >= 20) + 11 * position) % 300 for position in range(length))
        made.append(Request(f"r{index}", prompt, replace(sampling, max_tokens=9, ignore_eos=True)))
    return made


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["float32", "int8", pytest.param("fp8", marks=pytest.mark.full)]
)
async def workers(request: pytest.FixtureRequest, model: str) -> AsyncIterator[dict[str, Worker]]:
    """Of each setting one prefill worker and two decode workers, one of which has blocks of another size."""
    shared, mine, other = SharedMemory(), replace(ENGINE, dtype=request.param), replace(OTHER, dtype=request.param)
    made: dict[str, Worker] = {}
    try:
        for parallel in PARALLEL:
            # Of each second setting the blocks come by way of a staging area.
            staging = (len(made) // 3 % 2) * 200_000
            for kind, engine, staging_bytes in (("p", mine, 0), ("d", mine, 0), ("o", other, staging)):
                name = f"{kind}{words(parallel)}"
                made[name] = await parallel_worker(
                    name, model, parallel, engine, shared, prefix_tokens=24, staging_bytes=staging_bytes
                )
        yield made
    finally:
        for worker in made.values():
            await worker.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(workers: dict[str, Worker]) -> list[tuple[int, ...]]:
    return await colocated(workers["p1x1"], requests())


@pytest.mark.parametrize("kind", ["d", "o"], ids=["equal blocks", "other blocks"])
@pytest.mark.parametrize("decode", [words(each) for each in PARALLEL])
@pytest.mark.parametrize("prefill", [words(each) for each in PARALLEL])
async def test_split_output_equals_colocated_output(
    workers: dict[str, Worker], expected: list[tuple[int, ...]], prefill: str, decode: str, kind: str
) -> None:
    here, there = workers[f"p{prefill}"], workers[f"{kind}{decode}"]
    moved = await Legs(here, there).run(requests())
    assert [each.tokens for each in moved] == expected
    for each, length in zip(moved, LENGTHS, strict=True):  # whole blocks may be here already, from another pair
        left = length - each.report.reused_blocks * there.config.engine.block_size
        assert (each.report.digests_verified > 0) == (each.report.num_bytes > 0) == (left > 0)
    for worker in (here, there):
        await worker.check()
        assert not len(worker.engine.leases)


@pytest.mark.parametrize("parallel", [words(each) for each in PARALLEL])
async def test_a_gang_alone_answers_like_one_rank(
    workers: dict[str, Worker], expected: list[tuple[int, ...]], parallel: str
) -> None:
    assert await colocated(workers[f"d{parallel}"], requests()) == expected
    await workers[f"d{parallel}"].check()


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8"])
@pytest.mark.parametrize(
    "family",
    ["gpt oss", "llama 4, some dense", "qwen 3 next", "qwen 3.5", "deepseek 2, no query latent", "deepseek 3"],
)
async def test_attention_sinks_chunks_state_latents_and_sharded_experts_split_alike(
    tmp_path: Path, family: str, dtype: str
) -> None:
    model, engine, shared = str(write_family(tmp_path / "m", family)), replace(ENGINE, dtype=dtype), SharedMemory()
    settings = {"alone": (1, 1), "two": (2, 1), "stages": (1, 3)}
    made = [
        await parallel_worker(name, model, ParallelConfig(*each), engine, shared) for name, each in settings.items()
    ]
    try:
        alone, two, stages = made
        wanted = await colocated(alone, requests())
        for legs in (Legs(two, stages), Legs(stages, two)):
            assert [each.tokens for each in await legs.run(requests())] == wanted
    finally:
        for worker in made:
            await worker.close()


async def test_kv_of_another_dtype_is_converted(
    workers: dict[str, Worker], model: str, expected: list[tuple[int, ...]]
) -> None:
    """A decode worker that stores bfloat16: every block checked as it was, the first token the prefill's own."""
    engine = replace(OTHER, dtype="bfloat16")
    decode = await parallel_worker(
        "bf2x1", model, ParallelConfig(2, 1), engine, SharedMemory(), prefix_tokens=24, staging_bytes=200_000
    )
    try:
        for prefill in ("p1x3", "p2x2"):
            moved = await Legs(workers[prefill], decode).run(requests())
            assert [each.tokens[0] for each in moved] == [tokens[0] for tokens in expected]
            assert all(len(each.tokens) == len(tokens) for each, tokens in zip(moved, expected, strict=True))
            assert moved[-1].report.digests_verified > 0
        await decode.check()
    finally:
        await decode.close()


async def test_kv_of_another_dtype_without_staging_memory_is_refused_at_preflight(
    workers: dict[str, Worker], model: str
) -> None:
    engine = replace(ENGINE, dtype="bfloat16")
    decode = await parallel_worker("bf1x1", model, ParallelConfig(), engine, SharedMemory())
    try:
        with pytest.raises(PeerRefused, match=r"set transfer\.staging_bytes to"):
            await decode.connect((await workers["p1x1"].info()).peer)
    finally:
        await decode.close()
