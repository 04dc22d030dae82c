import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model.paging import ragged, scattered_tables
from workers.errors import ModelError
from workers.executor.threads import ComputeThread
from workers.ops import attention
from workers.ops.attention import NATIVE, REFERENCE, SDPA, Attention, best_attention
from workers.ops.batch import RaggedBatch, Scoring
from workers.ops.native.library import library

CPU = torch.device("cpu")
pytestmark = [pytest.mark.full, pytest.mark.skipif(library() is None, reason="no native kernels here")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_the_pool_as_torch_rounds_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).int().view(torch.float32)
    small = torch.randn(100_000, generator=generator) * 2.0 ** torch.randint(-30, 20, (100_000,), generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.9, 65520.0, 2**-24, 2**-25])
    numbers = torch.cat([anything, small, special, special.nextafter(torch.tensor(0.0))])
    numbers = numbers[: len(numbers) // 10 * 10].view(-1, 1, 10)
    pool = torch.zeros(1, 1, 1, 2, len(numbers), 10, dtype=dtype)
    lengths = [len(numbers)]
    NATIVE.write_kv(pool, numbers, -numbers, 0, ragged([[0]], lengths, lengths, len(numbers)).slot_mapping)
    most = torch.finfo(dtype).max if dtype is torch.float16 else torch.inf  # float16 saturates
    for written, given in ((pool[0, 0, 0, 0], numbers[:, 0]), (pool[0, 0, 0, 1], -numbers[:, 0])):
        number, rounded = ~given.isnan(), given.clamp(-most, most).to(dtype)
        assert torch.equal(written.view(torch.int16)[number], rounded.view(torch.int16)[number])
        assert torch.equal(written.isnan(), given.isnan())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("threads", [1, 2])
def test_long_contexts_split_over_threads_equal_the_reference(head_dim: int, threads: int) -> None:
    contexts, queries = [3000, 1, 1500], [1, 1, 70]
    tables = scattered_tables(contexts, 300, 16, random.Random(0))
    pool = torch.randn(300, 2, 1, 2, 16, head_dim, generator=torch.Generator().manual_seed(1))
    query = torch.randn(72, 8, head_dim, generator=torch.Generator().manual_seed(2))
    arguments = (query, pool, 0, ragged(tables, queries, contexts, 16), Scoring(head_dim**-0.5))
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(NATIVE.attend(*arguments), REFERENCE.attend(*arguments), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(1)


def test_the_kernels_share_torchs_only_openmp() -> None:
    loaded = library()
    assert loaded is not None
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]) == 1
    for threads in (2, 1):
        torch.set_num_threads(threads)
        assert loaded.omp_get_max_threads() == threads


async def test_a_compute_thread_governs_the_kernels_by_its_own_number() -> None:
    loaded = library()
    assert loaded is not None
    thread = ComputeThread("test", 2)
    assert await thread.run(loaded.omp_get_max_threads) == 2
    assert loaded.omp_get_max_threads() == 1
    await thread.close()


def test_the_best_attention_of_a_cpu_is_native_and_batch_invariant() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn):
        assert best_attention(CPU, dtype, deterministic=True) is NATIVE
        assert best_attention(CPU, dtype, deterministic=False) is NATIVE


def test_without_kernels_torch_computes_and_deterministic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "library", lambda: None)
    choose = best_attention.__wrapped__
    assert choose(CPU, torch.float32, deterministic=False) is SDPA
    with pytest.raises(ModelError, match=r"install g\+\+"):
        choose(CPU, torch.float32, deterministic=True)


def test_a_backend_is_tried_with_the_heads_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with too little shared memory for wide heads."""

    def narrow(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
        if query.shape[1:] == (2 * 3, 256):
            raise RuntimeError("out of resource: shared memory")
        return NATIVE.attend(query, pool, layer, batch, scoring)

    monkeypatch.setattr(attention, "NATIVE", replace(NATIVE, attend=narrow))
    choose = best_attention.__wrapped__
    assert choose(CPU, torch.float32, deterministic=True, heads=(3, 128)).attend is narrow
    assert choose(CPU, torch.float32, deterministic=False, heads=(3, 256)) is SDPA
    with pytest.raises(ModelError, match="no batch-invariant attention on cpu"):
        choose(CPU, torch.float32, deterministic=True, heads=(3, 256))


def test_the_switch_turns_the_kernels_off() -> None:
    code = "import torch; from workers.ops.attention import best_attention;"
    code += "print(best_attention(torch.device('cpu'), torch.float32, False).name)"
    root = Path(__file__).parents[2]
    environment = {"DIPTYCH_NATIVE": "0", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == "sdpa", run.stderr


def test_a_backend_that_computes_wrongly_or_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
        return REFERENCE.attend(query, pool, layer, batch, replace(scoring, window=0))

    def fails(*_: object) -> None:
        raise RuntimeError("no kernel image")

    for broken in (
        Attention("forgetful", REFERENCE.write_kv, without_window),
        Attention("failing", fails, REFERENCE.attend),
    ):
        monkeypatch.setattr(attention, "NATIVE", broken)
        assert best_attention.__wrapped__(CPU, torch.float32, deterministic=False) is SDPA
