"""The GPU's sampler takes the host's tokens: torch on the CPU, the kernel in Triton's interpreter."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu.parts.sampling import asked_host
from tests.examples import examples
from tests.model.test_sampler import draw
from workers.engine.step import Draw
from workers.executor import device_sampler
from workers.executor.device_sampler import sample_on_device
from workers.executor.grammar_masks import Mask
from workers.executor.gumbel_max import uniforms_of_all
from workers.executor.sampler import sample, sample_finite

pytest.importorskip("triton")
DEVICE = torch.device(os.environ.get("DIPTYCH_TEST_DEVICE", "cpu"))

COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.ops.triton_filters import _bound
from workers.ops.triton_sampling import _decide, _sample, _summarize

def ptx(kernel, *types, **sizes):
    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(sizes)]))
    return compile(ASTSource(kernel, signature, sizes), target=GPUTarget("cuda", 90, 32)).asm["ptx"]

for scores, filtered in ("*fp32", True), ("*bf16", False):
    ptx(_summarize, scores, "i32", "*fp32", "*i32", "i32", TILE=1024)
    types = [scores, "i32", "*fp32", "*i32", "*i64", "*fp64", "*fp64", "*i32", "*i64", "i32"]
    sizes = {"TILE": 1024, "TILES": 128, "FILTERED": filtered}
    found = ptx(_sample, *types, **sizes)
    assert "mul.hi.u64" in found and "div.rn.f32" in found and "div.full.f32" not in found
    ptx(_decide, *types, **sizes)
types = ["*bf16", "i32", "*fp32", "i32", "*i64", "*fp64", "*fp64", "i32"]
ptx(_bound, *types, TILE=4096, TILES=128, UNUSED=16)
"""


def random_logits(rows: int, vocab: int, spread: float, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).to(DEVICE)  # bfloat16 has many ties


def random_mask(vocab: int, share: float, seed: int) -> Mask:
    """Allows about this share of the tokens, and token 7 always."""
    bits = np.zeros(32 * -(-vocab // 32), np.bool_)
    bits[:vocab] = np.random.default_rng(seed).random(vocab) < share
    bits[7] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@st.composite
def draws(data: st.DrawFn) -> Draw:
    some = data(st.booleans())  # with penalties
    return draw(
        position=data(st.integers(0, 2**20)),
        seed=data(st.integers(0, 2**64 - 1)),
        prompt=tuple(range(9)) if some else (),
        answer=(3, 4, 4) if some else (),
        banned=data(st.sampled_from([(), (), (1, 2)])),
        temperature=data(st.sampled_from([0.0, 1e-9, 0.7, 1.0, 3.0])),
        top_k=data(st.sampled_from([0, 0, 1, 20, 100_000])),
        top_p=data(st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.9, 0.999])),
        min_p=data(st.sampled_from([0.0, 0.0, 1e-3, 0.2, 1.0])),
        repetition_penalty=data(st.sampled_from([1.0, 1.3])) if some else 1.0,
        frequency_penalty=0.3 if some else 0.0,
        presence_penalty=-0.2 if some else 0.0,
        logit_bias=data(st.sampled_from([(), (), ((2, 3.5), (11, -1.0))])),
        logprobs=data(st.sampled_from([None, 0, 3])),
    )


@examples(20)
@given(
    rows=st.lists(draws(), min_size=1, max_size=5),
    vocab=st.sampled_from([50, 256, 1100]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 60.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
    masked=st.sets(st.integers(0, 4)),
    share=st.sampled_from([0.02, 0.5, 1.0]),
)
def test_the_device_samples_what_the_host_samples(
    rows: list[Draw],
    vocab: int,
    spread: float,
    dtype: torch.dtype,
    seed: int,
    masked: set[int],
    share: float,
) -> None:
    masks = {row: random_mask(vocab, share, seed + row) for row in sorted(masked) if row < len(rows)}
    logits = random_logits(len(rows), vocab, spread, seed, dtype)
    before = logits.clone()
    tokens, logprobs = sample_on_device(logits, rows, masks)
    assert torch.equal(logits, before)
    expected_tokens, expected_logprobs = sample_finite(logits.float().cpu(), rows, masks)
    assert tokens == expected_tokens
    for found, expected in zip(logprobs, expected_logprobs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.chosen == pytest.approx(expected.chosen, abs=1e-4)
            values = [value for _, value in expected.top]
            assert [value for _, value in found.top] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("vocab", [1, 3])
def test_a_tiny_vocabulary_is_sampled_alike(vocab: int) -> None:
    logits = random_logits(4, vocab, 1.0, vocab)
    rows = [draw(0), draw(1, top_p=0.5), draw(2, top_k=2, min_p=0.1), draw(3, temperature=0)]
    assert sample_on_device(logits, rows) == sample(logits.cpu(), rows)


@pytest.mark.full
@pytest.mark.parametrize("spread", [0.05, 5.0])
def test_rows_that_are_longer_than_a_tile_are_sampled_alike(spread: float) -> None:
    logits = random_logits(5, 20_001, spread, 3)
    rows = [
        draw(0),
        draw(1, top_k=40),
        draw(2, top_p=0.95),
        draw(3, top_k=3000, top_p=0.5, min_p=1e-4),
        draw(4, temperature=0),
    ]
    assert sample_on_device(logits, rows) == sample(logits.cpu(), rows)


@pytest.mark.full
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_p": 1.0}])
@pytest.mark.parametrize("mate", [{}, {"min_p": 0.05, "top_p": 0.5, "top_k": 9}])
def test_the_host_is_rarely_asked(
    filters: dict[str, float], mate: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the device could not decide")

    monkeypatch.setattr(device_sampler, "sample", never)
    logits = random_logits(9, 1200, 3.0, 0)
    sample_on_device(logits, [*(draw(position, **filters) for position in range(8)), draw(9, **mate)])  # type: ignore[arg-type]


def test_the_host_decides_what_is_close() -> None:
    """Two tokens far above all others whose values are equal, and log probabilities of the host's choice."""
    times = torch.from_numpy(uniforms_of_all(5, 8, 1500)).neg().log1p().neg()
    row = torch.full((1, 1500), -30.0)
    row[0, 3], row[0, 1200] = 0.0, float((times[1200] / times[3]).log())
    asked: list[int] = []
    close = draw(8, seed=5, logprobs=1)
    with asked_host(asked):
        found = sample_on_device(torch.cat([row, row]).to(DEVICE), [draw(temperature=0), close])
    assert found[0] == [3 if float(row[0, 1200]) <= 0 else 1200, sample(row, [close])[0][0]]
    assert asked == [1] and found[1][1] == sample(row, [close])[1][0]


def test_a_row_that_is_not_finite_has_no_token_and_spoils_no_other() -> None:
    logits = random_logits(5, 300, 3.0, 1)
    expected = sample_on_device(logits, [draw(row, logprobs=2) for row in range(5)])
    for row, number in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        logits[row, 7] = number
    tokens, logprobs = sample_on_device(logits, [draw(row, logprobs=2) for row in range(5)])
    assert tokens == [expected[0][0], None, None, None, expected[0][4]]
    assert [found is None for found in logprobs] == [False, True, True, True, False]


def test_all_tokens_banned_is_the_hosts_case() -> None:
    logits = random_logits(1, 50, 1.0, 1)
    nothing = draw(banned=tuple(range(50)))
    assert sample_on_device(logits, [nothing])[0] == sample(logits.cpu(), [nothing])[0]


@pytest.mark.parametrize("broken", ["differs", "raises"])
def test_a_gpu_whose_tokens_differ_is_not_trusted(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert device_sampler._agrees(DEVICE, torch.bfloat16, 700) and not caplog.records

    def wrong(logits: Tensor, of: list[Draw], masks: dict[int, Mask]) -> object:
        if broken == "raises":
            raise RuntimeError("no kernel image")
        tokens, logprobs = sample_on_device(logits, of, masks)
        return [1 - (tokens[0] or 0), *tokens[1:]], logprobs

    monkeypatch.setattr(device_sampler, "sample_on_device", wrong)
    assert not device_sampler._agrees(DEVICE, torch.bfloat16, 700)
    reason = {"differs": "sampling gives wrong tokens", "raises": "does not work on cpu: no kernel image"}[broken]
    assert len(caplog.records) == 1 and reason.replace("cpu", str(DEVICE)) in caplog.text


def test_a_cpu_samples_on_the_host() -> None:
    assert device_sampler._sampler(torch.device("cpu"), torch.float32, 9) is sample_finite


@pytest.mark.full
def test_the_kernel_compiles_for_a_gpu() -> None:
    subprocess.run(
        [sys.executable, "-c", COMPILE], check=True, env={**os.environ, "TRITON_INTERPRET": "0"}, timeout=300
    )
