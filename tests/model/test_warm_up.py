"""What an executor computes before its worker is ready."""

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.plans import mixed
from kvtransfer.open import RESERVED_BLOCKS, SharedMemory
from kvtransfer.probe import SCRATCH_BLOCK
from tests.model.families import write_family
from tests.model.paging import pool_for
from tests.model.test_cuda_graphs import Repeated
from tests.model.test_executor import open_tiny
from tests.model.test_gang import open_tasks
from tests.model.tiny import write_tiny_llama
from workers.config import EngineConfig
from workers.engine.step import StepPlan
from workers.executor import rank, warm_up
from workers.executor.cuda_graphs import DecodeGraphs
from workers.executor.device_sampler import Sampled, agree, sample_on_device
from workers.executor.kv_pool import KVPool
from workers.executor.rank import ModelPart, Rank, compute
from workers.executor.warm_up import compiling_steps
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.ops.attention import SDPA, TRITON, TRITON_INVARIANT, Attention

CPU = torch.device("cpu")
CONTEXT = 512
ENGINE = EngineConfig(block_size=8, max_batch_tokens=48, max_running=4)


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Triton tells layers 0, 1 and 2 apart if a kernel lets it."""
    path = tmp_path_factory.mktemp("models") / "three-layers"
    return ModelFolder("tiny", write_tiny_llama(path, num_layers=3, context_length=CONTEXT))


@pytest.mark.full
@pytest.mark.parametrize("attention", [TRITON, TRITON_INVARIANT], ids=lambda each: each.name)
def test_requests_wait_for_no_kernel(
    three_layers: ModelFolder, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and sampling by Triton, of logits in half precision, also in batches so large that spans are long."""
    triton_paged = pytest.importorskip("workers.ops.triton_paged")
    from tests.model.kernel_variants import launched

    for name, size in {"PROGRAMS": 6, "SPLIT": 16, "LONG_SPLIT": 96}.items():
        monkeypatch.setattr(triton_paged, name, size)

    def sample_halves(logits: Tensor, *given: Any) -> Sampled:
        return sample_on_device(logits.bfloat16(), *given)

    monkeypatch.setattr(rank, "sample_rows", sample_halves)
    model = load_decoder(three_layers, CPU, torch.float32, attention=attention)
    pool = pool_for(model.config, 40, 8)
    with launched() as prepared:
        assert agree(CPU, torch.bfloat16, model.config.vocab_size)  # before the first sample
        for plan in compiling_steps(ENGINE, CONTEXT, ()):
            compute(ModelPart(model), pool, plan)
    with launched() as needed:
        for plan in mixed(12, range(RESERVED_BLOCKS, 40), 8):
            compute(ModelPart(model), pool, plan)
    assert not needed - prepared
    assert len(needed) >= 9 and {kernel for kernel, *_ in needed} == {kernel for kernel, *_ in prepared}


@pytest.mark.full
def test_requests_wait_for_no_kernel_between_attention_and_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms of queries and keys."""
    pytest.importorskip("triton")
    from tests.model.kernel_variants import launched

    folder = ModelFolder("tiny", write_family(tmp_path / "m", "qwen 3"))
    model = load_decoder(folder, CPU, torch.float32, attention=SDPA)
    pool = pool_for(model.config, 40, 8)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    with launched() as prepared:
        for plan in compiling_steps(ENGINE, CONTEXT, ()):
            compute(ModelPart(model), pool, plan)
    with launched() as needed:
        for plan in mixed(4, range(RESERVED_BLOCKS, 40), 8):
            compute(ModelPart(model), pool, plan)
    assert needed == prepared and {kernel for kernel, *_ in needed} == {"_rms_norm", "_gated", "_rotate"}


@pytest.mark.parametrize("max_running", [3, 4])
def test_requests_wait_for_no_graph(three_layers: ModelFolder, max_running: int) -> None:
    """Also where the largest bucket is more than the engine takes."""
    engine = replace(ENGINE, max_running=max_running)
    model = load_decoder(three_layers, CPU, torch.float32)
    pool, capture = pool_for(model.config, 40, 8), Repeated()
    part = ModelPart(model, graphs=DecodeGraphs(model, pool.blocks, max_running, CONTEXT, capture))
    assert part.graphs is not None
    for plan in compiling_steps(engine, CONTEXT, part.graphs.buckets):
        compute(part, pool, plan)
    captures = capture.captures
    assert captures == len(part.graphs.buckets) == 3
    for plan in mixed(20, range(RESERVED_BLOCKS, 39), 8):
        compute(part, pool, plan)
    assert capture.captures == captures and capture.replays > captures


@pytest.mark.parametrize("family", ["llama 3", "mixtral", "gpt oss", "deepseek 3", "qwen 3 next", "llama 4"])
def test_only_the_scratch_block_is_written(family: str, tmp_path: Path) -> None:
    model = load_decoder(ModelFolder("tiny", write_family(tmp_path / "m", family)), CPU, torch.float32)
    pool = pool_for(model.config, 5, 16)
    for plan in compiling_steps(EngineConfig(max_batch_tokens=64, max_running=3), 128, ()):
        done = compute(ModelPart(model), pool, plan)
        assert all(
            (token is None) == (chunk.draw is None) for token, chunk in zip(done.tokens, plan.chunks, strict=True)
        )
    written = [block for block in range(5) if pool.blocks[block].any()]
    assert written == [SCRATCH_BLOCK]


async def test_all_ranks_of_a_gang_compute_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_llama(tmp_path / "m", num_layers=3, hidden_size=72, num_heads=9, num_kv_heads=3)
    pools = []

    def steps(self: Rank, engine: EngineConfig, context_length: int) -> tuple[StepPlan, ...]:
        return compiling_steps(engine, context_length, ())

    def computed(part: ModelPart, pool: KVPool, *given: object) -> object:
        pools.append(pool)
        return compute(part, pool, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Rank, "warm_up_steps", steps)
    monkeypatch.setattr(rank, "compute", computed)
    gang = await open_tasks(ModelFolder(str(path), path), 3, 2, max_running=3)
    assert len(pools) == 6 * len(compiling_steps(ENGINE, CONTEXT, ()))
    assert not any(pool.blocks[RESERVED_BLOCKS:].any() for pool in pools)
    await gang.close()


async def test_it_ends_in_time_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, warm_up.__name__)
    done: list[StepPlan] = []

    async def execute(plan: StepPlan) -> None:
        done.append(plan)

    steps = warm_up.short_steps(ENGINE)
    await warm_up.warm_up("w", execute, steps)
    assert tuple(done) == steps and "w: 2 steps of warm-up took" in caplog.text
    await warm_up.warm_up("w", execute, steps, limit_s=0.0)
    assert tuple(done) == steps and "w: warm-up ends after 0 of 2 steps and 0 s" in caplog.text


async def test_an_executor_that_fails_in_it_leaves_nothing(
    three_layers: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a kernel does not compile")

    monkeypatch.setattr(rank, "compute", broken)
    shared = SharedMemory()
    with pytest.raises(RuntimeError, match="does not compile"):
        await open_tiny(three_layers, "failing", shared)
    assert not shared.regions
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("failing")]
