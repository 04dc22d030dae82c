import os
import subprocess
import sys

import gguf
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.config import EngineConfig
from workers.ops.linear import BLOCK_FORMATS, WEIGHT_FORMATS, linear_from_blocks, make_linear
from workers.ops.linear.blocks import BLOCK_BYTES, BLOCK_COLUMNS, KINDS, dequantize, quantize
from workers.ops.linear.dense import PANEL_ROWS
from workers.ops.linear.quantized import rounded_rows
from workers.ops.memory import HugePages
from workers.ops.native.library import SWITCH

SIZES = st.integers(1, 150)
EXAMPLES = 5 if os.environ.get(SWITCH) == "0" else 30  # the other process pays five times as much for each


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()


@settings(max_examples=EXAMPLES, deadline=None)
@given(rows=st.integers(0, 130), columns=SIZES, out=SIZES, bias=st.booleans(), deterministic=st.booleans())
def test_float32_is_exact_at_any_shape(rows: int, columns: int, out: int, bias: bool, deterministic: bool) -> None:
    x, weight = numbers(rows, columns, seed=rows), numbers(out, columns, seed=columns)
    offset = numbers(out, seed=out) if bias else None
    y = make_linear(weight, offset, deterministic=deterministic)(x)
    torch.testing.assert_close(y, exact(x, weight, offset), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [PANEL_ROWS - 1, PANEL_ROWS])
def test_float32_is_exact_on_both_sides_of_the_change_of_kernels(rows: int) -> None:
    x, weight, bias = numbers(rows, 576, seed=0), numbers(96, 576, seed=1), numbers(96, seed=2)
    torch.testing.assert_close(make_linear(weight, bias)(x), exact(x, weight, bias), rtol=1e-5, atol=1e-4)


@settings(max_examples=EXAMPLES, deadline=None)
@given(rows=SIZES, columns=SIZES, out=SIZES)
def test_bfloat16_rounds_the_weights_and_nothing_else(rows: int, columns: int, out: int) -> None:
    x, weight, bias = numbers(rows, columns, seed=rows), numbers(out, columns, seed=columns), numbers(out, seed=out)
    wanted = exact(x, weight.bfloat16().float(), bias)
    torch.testing.assert_close(
        make_linear(weight, bias, "bfloat16", deterministic=True)(x), wanted, rtol=1e-5, atol=2e-5
    )
    halves_lost = 2**-16 * exact(x.abs(), weight.abs(), None)  # where AMX takes x as two bfloat16
    assert ((make_linear(weight, bias, "bfloat16")(x) - wanted).abs() <= halves_lost + 2e-5).all()


@pytest.mark.parametrize("weight_format", BLOCK_FORMATS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(rows=st.integers(0, 70), columns=st.integers(1, 300), out=SIZES, bias=st.booleans())
def test_blocks_compute_what_they_stand_for(weight_format: str, rows: int, columns: int, out: int, bias: bool) -> None:
    """Up to rounding x: half a step of each block of 32, at most, for every weight that it meets."""
    x, weight = numbers(rows, columns, seed=rows), numbers(out, columns, seed=columns)
    offset = numbers(out, seed=out) if bias else None
    meant = dequantize(quantize(weight, weight_format), weight_format)[:, :columns]
    blocks = F.pad(x.abs(), (0, -columns % 32)).unflatten(1, (-1, 32))
    steps = (blocks.amax(dim=2, keepdim=True) / 127).expand_as(blocks).flatten(1)[:, :columns]
    error = (make_linear(weight, offset, weight_format)(x) - exact(x, meant, offset)).abs()
    assert (error <= exact(0.502 * steps, meant.abs(), None) + 1e-4).all()


@pytest.mark.parametrize("weight_format", BLOCK_FORMATS)
def test_every_bit_of_a_file_counts(weight_format: str) -> None:
    """Random blocks, scales apart, times unit vectors: what `gguf` reads of them."""
    out, columns = 45, 2 * BLOCK_COLUMNS[weight_format]
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (out, 2, BLOCK_BYTES[weight_format]), dtype=torch.uint8, generator=generator)
    scales = 2 if weight_format in ("q8_0", "q4_0") else 4  # bytes in front, one or two 16-bit numbers
    blocks[:, :, :scales] = (numbers(out, 2, scales // 2, seed=1) / 50).half().view(torch.uint8)
    blocks = blocks.view(out, -1)
    y = linear_from_blocks(blocks, columns, None, weight_format)(torch.eye(columns))
    meant = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), KINDS[weight_format]))
    torch.testing.assert_close(y, meant.T, rtol=1e-6, atol=1e-5)


def test_blocks_that_gguf_cannot_write_are_near_the_weights() -> None:
    weight = numbers(64, 512, seed=0)
    weight[3], weight[4, :256], weight[5] = 0, 1, weight[5].abs()
    error = dequantize(quantize(weight, "q4_k"), "q4_k") - weight
    assert (error.norm() / weight.norm()) < 0.09
    assert torch.equal(error[3], torch.zeros(512))


def test_blocks_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="64 columns in q8_0 take 68 bytes a row, these take 34"):
        linear_from_blocks(torch.zeros(3, 34, dtype=torch.uint8), 64, None, "q8_0")


@settings(max_examples=EXAMPLES, deadline=None)
@given(rows=st.integers(0, 70), columns=st.integers(1, 300), out=SIZES)
def test_int8_computes_with_rounded_rows(rows: int, columns: int, out: int) -> None:
    x, weight, bias = numbers(rows, columns, seed=rows), numbers(out, columns, seed=columns), numbers(out, seed=out)
    rounded, scales = rounded_rows(weight)
    meant = rounded * scales
    assert ((meant - weight).abs() <= 0.501 * scales).all()
    steps = (x.abs().amax(dim=1, keepdim=True) / 127).expand_as(x)
    error = (make_linear(weight, bias, "int8")(x) - exact(x, meant, bias)).abs()
    assert (error <= exact(0.502 * steps, meant.abs(), None) + 1e-4).all()


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    columns=st.sampled_from([1, 40, 64, 65, 577]),
    out=st.sampled_from([1, 31, 33, 300]),
    cuts=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 999),
)
def test_a_row_has_the_same_bits_in_any_batch_at_any_place_on_any_threads(
    weight_format: str, columns: int, out: int, cuts: list[int], threads: int, seed: int
) -> None:
    linear = make_linear(
        numbers(out, columns, seed=seed), numbers(out, seed=seed + 1), weight_format, deterministic=True
    )
    x = numbers(sum(cuts), columns, seed=seed + 2)
    alone = torch.cat([linear(row) for row in x.split(1)])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x), alone)
        assert torch.equal(linear(x[order]), alone[order])
        assert torch.equal(torch.cat([linear(batch) for batch in x.split(cuts)]), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_what_is_not_finite_stays_in_its_row(weight_format: str) -> None:
    linear = make_linear(numbers(70, 41, seed=0), None, weight_format)
    x = numbers(15, 41, seed=1)
    clean = linear(x)
    x[3, 40], x[11, 0] = torch.nan, torch.inf
    y = linear(x)
    others = [row for row in range(15) if row not in (3, 11)]
    assert not y[[3, 11]].isfinite().any()
    assert torch.equal(y[others], clean[others])


def test_a_view_is_read_by_its_strides() -> None:
    weight, x = numbers(8, 6, seed=0), numbers(6, 5, seed=1)
    torch.testing.assert_close(make_linear(weight)(x.T), x.T @ weight.T)
    torch.testing.assert_close(make_linear(weight[:, ::2])(x.T[:, ::2]), x.T[:, ::2] @ weight[:, ::2].T)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS[1:])
def test_the_weights_may_go_after_packing(weight_format: str) -> None:
    weight, x = numbers(8, 6, seed=0), numbers(2, 6, seed=1)
    linear = make_linear(weight, weight_format=weight_format)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"'int3' is unknown; known are float32, bfloat16, int8"):
        make_linear(torch.zeros(2, 2), weight_format="int3")


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_a_worker_may_be_asked_for_every_format(weight_format: str) -> None:
    assert EngineConfig(weights=weight_format).weights == weight_format


def test_a_worker_is_not_asked_for_another_format() -> None:
    with pytest.raises(ValueError, match=r"engine.weights 'int3' is not one of float32, bfloat16, int8"):
        EngineConfig(weights="int3")


def test_huge_pages_hand_out_what_is_apart_and_aligned() -> None:
    pages = HugePages()
    parts = [pages.empty(num_bytes) for num_bytes in (1, 100, 64, 70 << 20, 5)]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert [(int(part.min()), int(part.max())) for part in parts] == [(value, value) for value in range(5)]


def test_huge_pages_made_in_inference_mode_can_be_written_outside_it() -> None:
    pages = HugePages()
    with torch.inference_mode():
        parts = [pages.empty(64), pages.empty(64)]
    for part in (*parts, pages.empty(64)):
        part.fill_(1)


@pytest.mark.full
def test_all_holds_without_native_kernels() -> None:
    """This very file again, in a process that may not compile."""
    if os.environ.get(SWITCH) == "0":
        pytest.skip("is the other process")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, SWITCH: "0"}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:]
