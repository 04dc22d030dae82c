"""The linear layer of a GPU with `deterministic`, in Triton's interpreter; on a GPU with DIPTYCH_TEST_DEVICE."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = torch.device(os.environ.get("DIPTYCH_TEST_DEVICE", "cpu"))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}
if DEVICE.type != "cpu":
    TOLERANCE[torch.bfloat16] = 2e-2  # the interpreter cannot multiply it

triton_linear = pytest.importorskip("workers.ops.triton_linear")


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "size", "out", "biased"),
    [(0, 8, 8, True), (1, 1, 1, False), (3, 90, 140, True), (65, 512, 130, False), (140, 1100, 70, True)],
)
def test_it_equals_torch(rows: int, size: int, out: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = numbers(rows, size, seed=1, dtype=dtype), numbers(out, size, seed=2, dtype=dtype)
    bias = numbers(out, seed=3, dtype=dtype) if biased else None
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    bound = TOLERANCE[dtype]
    y = triton_linear.linear(x, weight, bias)
    torch.testing.assert_close(y.double(), wanted, rtol=bound, atol=bound * size**0.5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [40, 600])
def test_a_row_has_the_same_bits_in_any_batch(size: int, dtype: torch.dtype) -> None:
    """In batches for each kernel, and at places in each part of a tile."""
    weight, bias = numbers(70, size, seed=2, dtype=dtype), numbers(70, seed=3, dtype=dtype)
    x = numbers(200, size, seed=4, dtype=dtype)
    if DEVICE.type == "cpu":  # numpy's products differ from batch to batch: here they are exact, only their sums round
        weight, largest = (weight * 4).round(), 2.0**10 if dtype == torch.float32 else 8.0
        x = (x * 2).round() * torch.tensor([2.0**-12, largest, 1.0])[torch.arange(size) // 256 % 3].to(dtype)
    whole = triton_linear.linear(x, weight, bias)
    for first, stop in ((0, 1), (77, 78), (199, 200), (3, 5), (30, 129), (50, 190)):
        assert torch.equal(triton_linear.linear(x[first:stop], weight, bias), whole[first:stop])


def test_it_reads_rows_of_a_wider_tensor() -> None:
    wide, weight = (numbers(7, 80, seed=seed, dtype=torch.float32) for seed in (1, 2))
    wanted = F.linear(wide[:, 10:50], weight[:, 20:60])
    torch.testing.assert_close(triton_linear.linear(wide[:, 10:50], weight[:, 20:60], None), wanted)


@pytest.mark.parametrize(("out", "size"), [(4096, 4096), (28672, 4096), (128256, 4096), (4096, 14336), (64, 7)])
def test_spans_cover_all_columns_and_are_whole_tiles(out: int, size: int) -> None:
    for tiles in (triton_linear.HALF, triton_linear.SINGLE):
        span = triton_linear.span_of(out, size, tiles)
        assert span % tiles.depth == 0
        assert span >= min(size, triton_linear.MIN_SPAN)
        assert -(-size // span) <= triton_linear.MAX_SPANS
