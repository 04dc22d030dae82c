import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.ops.attention import REFERENCE
from workers.ops.batch import Heads
from workers.ops.fused import (
    CLAMPED_SILU,
    GELU_TANH,
    SILU,
    add_rms_norm,
    gated,
    rms_norm,
    rotate,
    rotate_and_write,
)
from workers.ops.native.library import SWITCH

try:
    from workers.ops import triton_fused
except ImportError:
    triton_fused = None  # type: ignore[assignment]

DEVICE = torch.device(os.environ.get("DIPTYCH_TEST_DEVICE", "cpu"))  # of Triton's kernels: a CPU interprets them
KINDS = (SILU, GELU_TANH, CLAMPED_SILU)
ROWS, SIZES = st.integers(0, 40), st.integers(1, 70)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, size=SIZES, weighted=st.booleans())
def test_rms_norm_equals_torch(rows: int, size: int, weighted: bool) -> None:
    x, weight = numbers(rows, size, seed=rows), numbers(size, seed=size) if weighted else None
    wanted = F.rms_norm(x.double(), (size,), None if weight is None else weight.double(), 1e-5).float()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), wanted, rtol=2e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, size=SIZES)
def test_adding_before_the_norm_gives_both(rows: int, size: int) -> None:
    x, delta = numbers(2, rows, size, seed=rows)
    weight = numbers(size, seed=size)
    total, y = add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, x + delta)
    assert torch.equal(y, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("activation", KINDS)
def test_gates_equal_double_precision_over_their_whole_range(activation: str) -> None:
    gate = torch.cat([torch.linspace(-110, 110, 20001), torch.linspace(-1, 1, 20001), torch.tensor([0.0, -0.0])])
    up, tolerance = numbers(len(gate), seed=0), 2e-7
    if activation == CLAMPED_SILU:
        up, tolerance = 4 * up, 1e-6  # reaches the clamp
        clamped, up_there = gate.double().clamp(max=7), up.double().clamp(-7, 7) + 1
        exact = clamped * torch.sigmoid(1.702 * clamped)
    else:
        exact, up_there = F.gelu(gate.double(), approximate="tanh"), up.double()
        exact = F.silu(gate.double()) if activation == SILU else exact
    y = gated(torch.cat([gate, up])[None], activation)[0]
    torch.testing.assert_close(y, (exact * up_there).float(), rtol=3e-6, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(tokens=ROWS, heads=st.integers(1, 5), half=st.integers(1, 9), rest=st.integers(0, 5))
def test_a_turn_reads_a_slice_and_leaves_what_has_no_angle(tokens: int, heads: int, half: int, rest: int) -> None:
    wide = numbers(tokens, heads + 2, 2 * half + rest, seed=tokens)
    cos, sin = numbers(2, tokens, 1, half, seed=half)
    x = wide[:, :heads]
    y = rotate(x, cos, sin)
    low, high = x[..., :half], x[..., half : 2 * half]
    torch.testing.assert_close(y[..., :half], low * cos - high * sin)
    torch.testing.assert_close(y[..., half : 2 * half], high * cos + low * sin)
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])
    assert y.is_contiguous()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    x = numbers(9, 34, seed=0)
    weight = torch.ones(34)
    calls = [lambda x: rms_norm(x, weight, 1e-5), lambda x: add_rms_norm(x, x, weight, 1e-5)[1]]
    calls += [partial(gated, activation=kind) for kind in KINDS]
    clean = [call(x) for call in calls]
    x[4, 3] = bad
    for number, (before, after) in enumerate(zip(clean, [call(x) for call in calls], strict=True)):
        assert torch.equal(before[[0, 1, 2, 3, 5, 6, 7, 8]], after[[0, 1, 2, 3, 5, 6, 7, 8]])
        if number == len(calls) - 1 and bad == torch.inf:
            assert after[4].isfinite().all()  # clamped
        elif bad != -torch.inf or before.shape[1] == 34:  # a gate of minus infinity is shut
            assert not after[4].isfinite().all()


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    if os.environ.get(SWITCH) == "0":
        pytest.skip("torch does not guarantee it")
    x = numbers(300, 2 * 577, seed=0)
    weight = numbers(2 * 577, seed=1)
    calls: list[Callable[[Tensor], Tensor]] = [lambda x: rms_norm(x, weight, 1e-5)]
    calls += [partial(gated, activation=kind) for kind in KINDS]
    for call in calls:
        assert torch.equal(call(x), torch.cat([call(row) for row in torch.split(x, 1)]))


@pytest.mark.full
def test_all_holds_without_native_kernels() -> None:
    """This very file again, in a process that may not compile."""
    if os.environ.get(SWITCH) == "0":
        pytest.skip("is the other process")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, SWITCH: "0"}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(triton_fused is None, reason="no Triton here")
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 5),
    size=SIZES,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_triton_equals_torch(rows: int, size: int, kind: str, dtype: torch.dtype) -> None:
    """On views too; bfloat16 within one rounding of the last step."""
    rtol = 2e-2 if dtype == torch.bfloat16 else 2e-5

    def near(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found.cpu(), wanted, rtol=rtol, atol=1e-3)

    x, delta, wide = (numbers(rows, width, seed=width).to(dtype) for width in (size, size + 1, 2 * size))
    weight = numbers(size, seed=rows).to(dtype)
    there, delta_there, wide_there, weight_there = (each.to(DEVICE) for each in (x, delta, wide, weight))
    near(triton_fused.rms_norm(wide_there[:, :size], weight_there, 1e-5), rms_norm(wide[:, :size], weight, 1e-5))
    near(triton_fused.rms_norm(there.view(rows, 1, size), None, 1e-5), rms_norm(x.view(rows, 1, size), None, 1e-5))
    for found, wanted in zip(
        triton_fused.add_rms_norm(there, delta_there[:, :size], weight_there, 1e-5),
        add_rms_norm(x, delta[:, :size], weight, 1e-5),
        strict=True,
    ):
        near(found, wanted)
    near(triton_fused.gated(wide_there, KINDS.index(kind)), gated(wide, kind))
    heads = numbers(rows, 5, 12, seed=size).to(dtype)
    for half in (6, 4):  # with and without features that stay
        cos, sin = numbers(2, rows, 1, half, seed=half).to(dtype)
        wanted = rotate(heads[:, :3].float(), cos.float(), sin.float()).to(dtype)
        near(triton_fused.rotate(heads.to(DEVICE)[:, :3], cos.to(DEVICE), sin.to(DEVICE)), wanted)


@pytest.mark.skipif(triton_fused is None, reason="no Triton here")
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 5),
    shape=st.tuples(st.sampled_from([1, 3, 7]), st.sampled_from([1, 2, 3]), st.sampled_from([7, 8, 12])),
    rotary=st.sampled_from([0, 4, 6]),
    norms=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_triton_writes_what_the_reference_writes(
    tokens: int, shape: tuple[int, int, int], rotary: int, norms: tuple[bool, bool], dtype: torch.dtype
) -> None:
    """Of queries, keys and values as views of a wider projection; other slots keep their bits."""
    group, kv_heads, head_dim = shape
    stacked = (group + 2) * kv_heads
    wide = numbers(tokens, stacked * head_dim + 5, seed=tokens).to(dtype)
    if dtype == torch.float16:
        wide[0, -5 - head_dim :] = torch.inf  # saturates
    cos, sin = numbers(2, tokens, 1, max(rotary, 2) // 2, seed=rotary).to(dtype)
    norm = numbers(stacked - kv_heads, head_dim, seed=head_dim).to(dtype) if norms[0] else None
    slots = torch.randperm(6 * 4, generator=torch.Generator().manual_seed(tokens))[:tokens]
    before = numbers(6, kv_heads, 3, 2, 4, head_dim, seed=group).to(dtype)
    reference = partial(rotate_and_write, write_kv=REFERENCE.write_kv)
    found = []
    for device, run in ((torch.device("cpu"), reference), (DEVICE, triton_fused.rotate_and_write)):
        turns = (cos.to(device), sin.to(device)) if rotary else None
        heads = Heads(turns, None if norm is None else norm.to(device), norms[1], 1e-5)
        pool = before.to(device, copy=True)
        stacks = torch.unflatten(wide.to(device)[:, :-5], 1, (stacked, head_dim))
        found.append((run(stacks, heads, pool, 1, slots.to(device)).cpu(), pool.cpu()))
    (wanted, theirs), (query, ours) = found
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(query, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(ours.shape, dtype=torch.bool)
    untouched[slots // 4, :, 1, :, slots % 4] = False
    assert query.is_contiguous() and torch.equal(ours[untouched], theirs[untouched])
