"""The operations between a layer's matrix products as Triton kernels: see `workers.ops.fused`.

A program takes one row (of a token, or of a token's heads); sums are in float32, whatever the numbers' dtype. Runs on a
GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of a program of `gated`


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `fused.rms_norm`. x may have one axis of any stride before the last."""
    size = x.shape[-1]
    rows = x.reshape(-1, size) if x.dim() != 2 else x
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm[(len(rows),)](
        rows, rows.stride(0), rows, 0, weight, y, y, size, eps,
        SIZE=triton.next_power_of_2(size), ADDED=False, WEIGHTED=weight is not None,
    )  # fmt: skip
    return y


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `fused.add_rms_norm`."""
    x, delta = x.contiguous(), delta.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(x)
    rows, size = x.shape
    _rms_norm[(rows,)](
        x, size, delta, size, weight, total, y, size, eps,
        SIZE=triton.next_power_of_2(size), ADDED=True, WEIGHTED=True,
    )  # fmt: skip
    return total, y


def gated(gate_up: Tensor, kind: int) -> Tensor:
    """See `fused.gated`; `kind` 0: silu, 1: gelu by tanh, 2: clamped silu."""
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, size)
    _gated[(rows, triton.cdiv(size, _COLUMNS))](gate_up, y, size, COLUMNS=_COLUMNS, KIND=kind)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `fused.rotate`."""
    tokens, heads, head_dim = x.shape
    half = cos.shape[-1]
    x = x if x.stride(2) == 1 else x.contiguous()
    y = x.new_empty(tokens, heads, head_dim)
    _rotate[(tokens,)](
        x, x.stride(0), x.stride(1), cos.contiguous(), sin.contiguous(), y, heads,
        HEAD_DIM=head_dim, HALF=half, HEADS=triton.next_power_of_2(heads), DIM=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x, x_stride, delta, delta_stride, weight, total, y, size, eps,
    SIZE: tl.constexpr, ADDED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = at < size
    numbers = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    if ADDED:
        numbers += tl.load(delta + row * delta_stride + at, inside, 0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)  # the norm is that of the sum as it is stored
        tl.store(total + row * size + at, rounded, inside)
        numbers = rounded.to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    if WEIGHTED:
        normed *= tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(y + row * size + at, normed.to(y.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate_up, y, size, COLUMNS: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, inside, 0.0).to(tl.float32)
    if KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        open_ = 0.5 * gate * (1.0 + (2.0 * tl.sigmoid(2.0 * inner) - 1.0))  # the last factor is tanh(inner)
    elif KIND == 2:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        open_ = gate * tl.sigmoid(1.702 * gate)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
    else:
        open_ = gate * tl.sigmoid(gate)
    tl.store(y + row * size + at, (open_ * up).to(y.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, token_stride, head_stride, cos, sin, y, heads,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token, head, at = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < heads) & (at < HALF)
    c = tl.load(cos + token * HALF + at, at < HALF, 0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + at, at < HALF, 0.0).to(tl.float32)
    source, target = x + token * token_stride + head * head_stride, y + (token * heads + head) * HEAD_DIM
    low = tl.load(source + at, inside, 0.0).to(tl.float32)
    high = tl.load(source + HALF + at, inside, 0.0).to(tl.float32)
    tl.store(target + at, (low * c - high * s).to(y.dtype.element_ty), inside)
    tl.store(target + HALF + at, (high * c + low * s).to(y.dtype.element_ty), inside)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        left = (head < heads) & (rest < HEAD_DIM)
        tl.store(target + rest, tl.load(source + rest, left, 0.0), left)
