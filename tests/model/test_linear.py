import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.ops.linear import make_linear
from workers.ops.linear.dense import PANEL_ROWS
from workers.ops.linear.memory import HugePages
from workers.ops.native.library import SWITCH

SIZES = st.integers(1, 150)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=40, deadline=None)
@given(rows=SIZES, columns=SIZES, out=SIZES)
def test_bfloat16_rounds_the_weights_and_nothing_else(rows: int, columns: int, out: int) -> None:
    x, weight, bias = numbers(rows, columns, seed=rows), numbers(out, columns, seed=columns), numbers(out, seed=out)
    y = make_linear(weight, bias, "bfloat16")(x)
    torch.testing.assert_close(y, exact(x, weight.bfloat16().float(), bias), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
@settings(max_examples=25, deadline=None)
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


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
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


def test_the_weights_may_change_after_packing() -> None:
    weight, x = numbers(8, 6, seed=0), numbers(2, 6, seed=1)
    linear = make_linear(weight, weight_format="bfloat16")
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"'int3' is unknown; known are float32, bfloat16"):
        make_linear(torch.zeros(2, 2), weight_format="int3")


def test_huge_pages_hand_out_what_is_apart_and_aligned() -> None:
    pages = HugePages()
    parts = [pages.empty(num_bytes) for num_bytes in (1, 100, 64, 70 << 20, 5)]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert [(int(part.min()), int(part.max())) for part in parts] == [(value, value) for value in range(5)]


def test_all_holds_without_native_kernels() -> None:
    """This very file again, in a process that may not compile."""
    if os.environ.get(SWITCH) == "0":
        pytest.skip("is the other process")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, SWITCH: "0"}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:]
