"""The operations between a layer's matrix products as Triton kernels: see `workers.ops.fused`.

A program takes one row, or the heads of a token that share a KV head; sums are in float32, whatever the numbers' dtype.
Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.ops.batch import Heads

_COLUMNS = 1024  # of a program of `gated`


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `fused.rms_norm`. x may have one axis of any stride before the last."""
    size = x.shape[-1]
    rows = x.reshape(-1, size) if x.dim() != 2 else x
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm[(len(rows),)](
        rows, rows.stride(0), rows, 0, weight, y, y, size, eps,
        ADDED=False, WEIGHTED=weight is not None, **_of_row(size),
    )  # fmt: skip
    return y


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `fused.add_rms_norm`."""
    x, delta = x.contiguous(), delta.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(x)
    rows, size = x.shape
    _rms_norm[(rows,)](
        x, size, delta, size, weight, total, y, size, eps, ADDED=True, WEIGHTED=True, **_of_row(size),
    )  # fmt: skip
    return total, y


def _of_row(size: int) -> dict[str, int]:
    """A thread takes 8 numbers of a row, which are one load in half precision."""
    columns: int = triton.next_power_of_2(size)
    return {"SIZE": columns, "num_warps": min(16, max(1, columns // 256))}


def gated(gate_up: Tensor, kind: int) -> Tensor:
    """See `fused.gated`; `kind` 0: silu, 1: gelu by tanh, 2: clamped silu."""
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, size)
    _gated[(rows, triton.cdiv(size, _COLUMNS))](gate_up, y, size, COLUMNS=_COLUMNS, KIND=kind)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `fused.rotate`."""
    x = x if x.stride(2) == 1 else x.contiguous()
    return _rotated(x, x.shape[1], 1, Heads((cos, sin)), None)


def rotate_and_write(qkv: Tensor, heads: Heads, pool: Tensor, layer: int, slots: Tensor) -> Tensor:
    """See `fused.rotate_and_write`, for a pool of qkv's dtype."""
    kv_heads = pool.shape[1]
    group = qkv.shape[1] // kv_heads - 2
    return _rotated(qkv, group, kv_heads, heads, (pool, layer, slots))


def _rotated(x: Tensor, group: int, kv_heads: int, heads: Heads, target: tuple[Tensor, int, Tensor] | None) -> Tensor:
    """The queries [tokens, group * kv_heads, head_dim] of x; its keys and values go to `target`: pool, layer, slots."""
    tokens, _, head_dim = x.shape
    y = x.new_empty(tokens, group * kv_heads, head_dim)
    cos, sin = (None, None) if heads.rotation is None else (each.contiguous() for each in heads.rotation)
    half = head_dim // 2 if cos is None else cos.shape[-1]
    pool, layer, slots = target or (None, 0, None)
    _rotate[(tokens, kv_heads)](
        x, x.stride(0), x.stride(1), heads.norm, heads.eps, cos, sin, y, pool, slots, layer,
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=half, WRITES=pool is not None,
        LAYERS=1 if pool is None else pool.shape[2], BLOCK=1 if pool is None else pool.shape[4],
        NORMED=heads.norm is not None, ROTATED=cos is not None, NORMED_AFTER=heads.norm_after,
        ROWS=triton.next_power_of_2(group + 2 * (pool is not None)), DIM=triton.next_power_of_2(max(1, half)),
        REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        num_warps=4 if group > 16 else 1,
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
    if WEIGHTED:
        factor = tl.load(weight + at, inside, 0.0).to(tl.float32)  # before the sum, so that no load waits for it
    if ADDED:
        numbers += tl.load(delta + row * delta_stride + at, inside, 0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)  # the norm is that of the sum as it is stored
        tl.store(total + row * size + at, rounded, inside)
        numbers = rounded.to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    if WEIGHTED:
        normed *= factor
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


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, token_stride, head_stride, norm, eps, cos, sin, y, pool, slots, layer,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, WRITES: tl.constexpr,
    LAYERS: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
    NORMED_AFTER: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Of one token and KV head: the GROUP queries; WRITES: then the key and the value, as two more rows."""
    token, kv_head, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS)[:, None]
    at, rest = tl.arange(0, DIM)[None, :], 2 * HALF + tl.arange(0, REST)[None, :]
    is_query, turns = row < GROUP, row <= GROUP  # a value stays as it is
    head = tl.where(is_query, kv_head * GROUP + row, row * KV_HEADS + kv_head)  # all queries, all keys, all values
    known = row < GROUP + 2 if WRITES else is_query
    inside, left = known & (at < HALF), known & (rest < HEAD_DIM)
    source = x + token * token_stride + head * head_stride
    low = tl.load(source + at, inside, 0.0).to(tl.float32)
    high = tl.load(source + HALF + at, inside, 0.0).to(tl.float32)
    last = tl.load(source + rest, left, 0.0).to(tl.float32)
    if NORMED:
        scale = tl.where(turns, _inverse_size(low, high, last, HEAD_DIM, eps), 1.0)
        weight = norm + head * HEAD_DIM
        low *= scale * tl.load(weight + at, inside & turns, 1.0).to(tl.float32)
        high *= scale * tl.load(weight + HALF + at, inside & turns, 1.0).to(tl.float32)
        last *= scale * tl.load(weight + rest, left & turns, 1.0).to(tl.float32)
    if ROTATED:
        c = tl.load(cos + token * HALF + at, at < HALF, 0.0).to(tl.float32)
        s = tl.load(sin + token * HALF + at, at < HALF, 0.0).to(tl.float32)
        turned = low * c - high * s
        high = tl.where(turns, high * c + low * s, high)
        low = tl.where(turns, turned, low)
    if NORMED_AFTER:
        scale = tl.where(turns, _inverse_size(low, high, last, HEAD_DIM, eps), 1.0)
        low, high, last = low * scale, high * scale, last * scale
    target = y + (token * GROUP * KV_HEADS + head) * HEAD_DIM
    if WRITES:
        if pool.dtype.element_ty == tl.float16:  # as `to_slots`
            low, high, last = _saturated(low), _saturated(high), _saturated(last)
        slot = tl.load(slots + token)
        vector = ((slot // BLOCK * KV_HEADS + kv_head) * LAYERS + layer) * 2 + row - GROUP
        target = tl.where(is_query, target, pool + (vector * BLOCK + slot % BLOCK) * HEAD_DIM)
    tl.store(target + at, low.to(y.dtype.element_ty), inside)
    tl.store(target + HALF + at, high.to(y.dtype.element_ty), inside)
    tl.store(target + rest, last.to(y.dtype.element_ty), left)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_size(low, high, last, HEAD_DIM: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    """[ROWS, 1]: one divided by the root mean square of each row."""
    squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(last * last, 1)
    return tl.rsqrt(squares / HEAD_DIM + eps)[:, None]


@triton.jit
def _saturated(numbers):  # type: ignore[no-untyped-def]
    return tl.clamp(numbers, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
