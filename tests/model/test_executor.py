import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.digest import combine
from kvtransfer.errors import TransferError
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import PeerAddress, Piece
from kvtransfer.transport import PullOrder
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.engine.executor import Executor
from workers.engine.step import Chunk, Draw, StepPlan
from workers.errors import ModelError
from workers.executor.rank import Rank
from workers.executor.rank_loader import kv_dtype, open_solo
from workers.model.folder import ModelFolder
from workers.request import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPT = tuple(range(10, 31))  # 21 tokens: two blocks of 8 and a tail
BLOCKS = (4, 2, 9)


def config(name: str = "w", **engine: Any) -> WorkerConfig:
    sizes = EngineConfig(**{"block_size": 8, "kv_blocks": 16, "max_batch_tokens": 64, "threads": 1, **engine})
    return WorkerConfig(name, "pool", "tiny", sizes, transfer=TransferConfig(backends=("memory",)))


async def open_tiny(tiny: ModelFolder, name: str = "w", shared: SharedMemory | None = None, **engine: Any) -> Rank:
    return await open_solo(config(name, **engine), tiny, f"{name}-1", shared or SharedMemory())


def prompt_plan(blocks: tuple[int, ...] = BLOCKS, prompt: tuple[int, ...] = PROMPT, number: int = 1) -> StepPlan:
    chunk = Chunk("a/0", prompt, 0, blocks, Draw(GREEDY, 0, len(prompt)))
    return StepPlan(number, (chunk,), digest_blocks=slots(blocks, len(prompt)))


def slots(blocks: tuple[int, ...], num_tokens: int = len(PROMPT)) -> tuple[tuple[int, int], ...]:
    """(block, slots that hold tokens) of a prompt in blocks of 8."""
    return tuple((block, min(8, num_tokens - 8 * index)) for index, block in enumerate(blocks))


def pull_order(executor: Executor, digests: tuple[bytes, ...]) -> PullOrder:
    layout = executor.facts.layout
    piece = Piece(0, layout.heads, layout.layers)
    checks = ((piece, combine(digests, layout, piece)),)
    return PullOrder("owner-1", BLOCKS, (12, 13, 14), 0, len(PROMPT), checks, 5.0)


async def decode(executor: Executor, tokens: list[int], blocks: tuple[int, ...], count: int) -> list[int]:
    """`count` more tokens, one step each; `tokens` are all so far, the last not yet in the pool."""
    tokens = list(tokens)
    for number in range(count):
        position = len(tokens) - 1
        chunk = Chunk("a/0", (tokens[-1],), position, blocks, Draw(GREEDY, 0, position + 1))
        result = await executor.execute(StepPlan(number, (chunk,)))
        assert result.tokens[0] is not None
        tokens.append(result.tokens[0])
    return tokens


async def test_a_plan_gives_its_result(tiny: ModelFolder) -> None:
    executor = await open_tiny(tiny)
    middle = Chunk("b/0", PROMPT[:5], 0, (7,), None)
    plan = StepPlan(3, (prompt_plan().chunks[0], middle), digest_blocks=slots(BLOCKS))
    result = await executor.execute(plan)
    assert result.number == 3 and result.seconds > 0
    assert result.tokens[0] in range(320) and result.tokens[1] is None
    assert len(result.digests) == 1 and len(set(result.digests[0])) == 3
    assert executor.facts.layout.block_bytes == executor.shards()[0].layout.block_bytes
    await executor.close()


async def test_digests_follow_the_content_not_the_block(tiny: ModelFolder) -> None:
    executor = await open_tiny(tiny)
    first = (await executor.execute(prompt_plan())).digests[0]
    moved = (await executor.execute(prompt_plan((5, 6, 8)))).digests[0]
    other = (await executor.execute(prompt_plan((10, 11, 12), (PROMPT[0] + 1, *PROMPT[1:])))).digests[0]
    assert first == moved
    assert not set(first) & set(other)
    await executor.close()


async def test_chunks_and_mixed_steps_give_the_tokens_of_one_prefill(tiny: ModelFolder) -> None:
    executor = await open_tiny(tiny)
    whole = (await executor.execute(prompt_plan())).tokens[0]
    assert whole is not None
    alone = await decode(executor, [*PROMPT, whole], BLOCKS, 2)
    blocks = (3, 11, 5)
    await executor.execute(StepPlan(1, (Chunk("b/0", PROMPT[:9], 0, blocks[:2], None),)))
    rest = Chunk("b/0", PROMPT[9:], 9, blocks, Draw(GREEDY, 0, 21))
    running = Chunk("a/0", (alone[-1],), len(alone) - 1, BLOCKS, Draw(GREEDY, 0, len(alone)))
    result = await executor.execute(StepPlan(2, (running, rest)))
    assert result.tokens[1] == whole
    assert result.tokens[0] == (await decode(executor, alone, BLOCKS, 1))[-1]
    await executor.close()


def peer(executor: Executor, incarnation: str) -> PeerAddress:
    return PeerAddress("p", incarnation, "127.0.0.1", 0, executor.shards())


async def test_decode_goes_on_elsewhere_after_a_pull(tiny: ModelFolder) -> None:
    shared = SharedMemory()
    owner, reader = [await open_tiny(tiny, name, shared) for name in ("owner", "reader")]
    prefill = await owner.execute(prompt_plan())
    assert prefill.tokens[0] is not None
    so_far = [*PROMPT, prefill.tokens[0]]
    stays = await decode(owner, so_far, BLOCKS, 2)
    await reader.connect(peer(owner, "owner-1"))
    # The tail has grown since; its digest covers the prompt's tokens only.
    read = reader.pull(pull_order(owner, prefill.digests[0]))
    await read.done
    await read.settled
    assert await decode(reader, so_far, (12, 13, 14), 2) == stays
    await owner.close()
    await reader.close()


async def test_workers_whose_weights_differ_in_format_do_not_exchange_kv(tiny: ModelFolder) -> None:
    shared = SharedMemory()
    owner = await open_tiny(tiny, "owner", shared)
    reader = await open_solo(config("reader", weights="int8"), tiny, "reader-1", shared)
    with pytest.raises(TransferError, match="is not ours"):
        await reader.connect(peer(owner, "owner-1"))
    await owner.close()
    await reader.close()


async def test_a_failed_pull_leaves_zeros(tiny: ModelFolder) -> None:
    shared = SharedMemory()
    owner, reader = await open_tiny(tiny, "owner", shared), await open_tiny(tiny, "reader", shared)
    await owner.execute(prompt_plan())
    await reader.connect(peer(owner, "owner-1"))
    cells = reader.facts.layout.num_kv_heads * reader.facts.layout.num_layers
    read = reader.pull(pull_order(reader, (bytes(8 * cells),) * 3))
    with pytest.raises(TransferError):
        await read.done
    await read.settled
    zeros, untouched = (await reader.execute(StepPlan(1, (), digest_blocks=((13, 8), (7, 8))))).digests[0]
    assert zeros == untouched
    await owner.close()
    await reader.close()


async def test_the_event_loop_runs_while_a_step_computes(tiny: ModelFolder) -> None:
    executor = await open_tiny(tiny)
    step = asyncio.ensure_future(executor.execute(prompt_plan()))
    turns = 0
    while not step.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1
    await executor.close()


async def test_a_pool_that_does_not_fit_says_how_many_blocks_would(tiny: ModelFolder) -> None:
    with pytest.raises(ModelError, match=r"engine.kv_blocks is 1000000000000: .* at most \d+ blocks \(\d+ tokens\)"):
        await open_solo(config(kv_blocks=10**12), tiny, "w-1", SharedMemory())


@pytest.mark.parametrize(
    ("change", "words"),
    [({"device": "toaster"}, "'toaster' is not a device"), ({"dtype": "bf16"}, "'bf16' is not one of auto, float32")],
)
def test_bad_devices_and_dtypes_are_named_before_anything_is_loaded(change: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**change)


async def test_bfloat16_without_hardware_for_it_is_warned_about(
    tiny: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for has_it in (True, False):
        monkeypatch.setattr("workers.executor.rank_loader.multiplies_bfloat16", lambda has_it=has_it: has_it)
        executor = await open_solo(config(weights="bfloat16"), tiny, "w-1", SharedMemory())
        await executor.close()
        assert ("this CPU has no instructions for it" in caplog.text) != has_it


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "fp8"])
async def test_kv_may_be_kept_in_fewer_bits(tiny: ModelFolder, dtype: str) -> None:
    executor = await open_solo(config(dtype=dtype), tiny, "w-1", SharedMemory())
    layout, pool = executor.facts.layout, executor._pool
    assert layout.dtype == dtype and pool.blocks.nbytes == 16 * layout.block_bytes
    token = (await executor.execute(prompt_plan())).tokens[0]
    assert token is not None and token < 320
    await executor.close()


@pytest.mark.model
async def test_the_real_model_says_paris(smollm2: ModelFolder, tmp_path: Path) -> None:
    sizes = EngineConfig(kv_blocks=8, threads=1)
    executor = await open_solo(
        WorkerConfig("w", "pool", smollm2.name, sizes, transfer=TransferConfig(backends=("memory",))),
        smollm2,
        "w-1",
        SharedMemory(),
    )
    prompt = (504, 3575, 282, 4649, 314)  # "The capital of France is"
    first = (await executor.execute(prompt_plan((5, 3), prompt))).tokens[0]
    assert first is not None
    tokens = await decode(executor, [*prompt, first], (5, 3), 7)
    assert tokens[5:] == [7042, 30, 198, 198, 504, 2988, 314, 42]
    await executor.close()


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8"])
async def test_a_row_without_finite_logits_samples_nothing_and_affects_no_other_row(
    tiny: ModelFolder, dtype: str
) -> None:
    executor = await open_solo(config(dtype=dtype), tiny, "w-1", SharedMemory())
    well, ill = prompt_plan().chunks[0], Chunk("b/0", (5, 6, 7), 0, (7,), Draw(GREEDY, 0, 3))
    (alone,) = (await executor.execute(StepPlan(1, (well,)))).tokens
    model = executor._part.model
    embed = model.embedding
    assert embed is not None
    model.embedding = lambda tokens: torch.where((tokens == 6)[:, None], torch.nan, embed(tokens))
    result = await executor.execute(StepPlan(2, (well, ill)))
    assert alone is not None and result.tokens == (alone, None)
    model.embedding = embed
    later = Chunk("b/0", (8,), 3, (7,), Draw(GREEDY, 0, 4))  # attends to what the pool holds
    assert (await executor.execute(StepPlan(3, (well, later)))).tokens == (alone, None)
    await executor.close()


def test_dtype_auto_is_float32_on_a_cpu_and_half_precision_on_a_gpu() -> None:
    gpu = torch.device("cuda", 0)
    assert [kv_dtype("auto", torch.device("cpu"), stored) for stored in ("float32", "bfloat16")] == ["float32"] * 2
    stored = ("float32", "bfloat16", "float16")
    assert [kv_dtype("auto", gpu, each) for each in stored] == ["bfloat16", "bfloat16", "float16"]
    assert kv_dtype("int8", gpu, "float16") == "int8"
