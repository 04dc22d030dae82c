"""The operations between a layer's matrix products, each in one pass over its rows.

Native kernels for float32 on a CPU take a few microseconds per call instead of torch's tens, and Triton's on a GPU make
one launch of up to seven; elsewhere torch computes the same up to rounding. A row's bits depend on no other row.
"""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops.batch import Heads
from workers.ops.native.library import kernel, library, pointer

SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"  # by the names that checkpoints use
CLAMPED_SILU = "clamped_silu"  # of gpt-oss: (up + 1) * gate * sigmoid(1.702 * gate), gate <= 7 and up in [-7, 7]
_GATES = {SILU: 0, GELU_TANH: 1, CLAMPED_SILU: 2}


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., size] divided by its root mean square, times weight [size] (None: 1). Returns a dense tensor."""
    if x.is_cuda:
        return _triton().rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    if not _native(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    kernel("rms_norm")(
        pointer(x), size, pointer(weight) if weight is not None else None, pointer(y), x.numel() // size, size, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm) for x and delta [rows, size]."""
    if x.is_cuda:
        return _triton().add_rms_norm(x, delta, weight, eps)  # type: ignore[no-any-return]
    if not _native(x, delta, weight):
        total = x + delta
        return total, F.rms_norm(total, (x.shape[-1],), weight, eps)
    x, delta = x.contiguous(), delta.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(x)
    kernel("add_rms_norm")(
        pointer(x), pointer(delta), pointer(weight), pointer(total), pointer(y), *x.shape, eps, torch.get_num_threads()
    )
    return total, y


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up [rows, size] for gate_up [rows, 2 * size] with the gate first, for one of `_GATES`."""
    if gate_up.is_cuda:
        return _triton().gated(gate_up, _GATES[activation])  # type: ignore[no-any-return]
    if not _native(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == CLAMPED_SILU:
            gate = gate.clamp(max=7.0)
            return (up.clamp(-7.0, 7.0) + 1.0) * gate * torch.sigmoid(1.702 * gate)
        return (F.silu(gate) if activation == SILU else F.gelu(gate, approximate="tanh")) * up
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, size)
    gate_up = gate_up.contiguous()
    kernel("gated")(pointer(gate_up), pointer(y), rows, size, _GATES[activation], torch.get_num_threads())
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + half]) of x [tokens, heads, head_dim] by its token's angle; later features stay.

    cos and sin are [tokens, 1, half]. x may be a slice of a wider tensor; the result is dense.
    """
    if x.is_cuda:
        return _triton().rotate(x, cos, sin)  # type: ignore[no-any-return]
    half = cos.shape[-1]
    if not _native(x, cos, sin) or x.stride(2) != 1:
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
    tokens, heads, head_dim = x.shape
    y = torch.empty(tokens, heads, head_dim)
    cos, sin = cos.contiguous(), sin.contiguous()
    kernel("rotate")(
        pointer(x), x.stride(0), x.stride(1), pointer(cos), pointer(sin), pointer(y), tokens, heads, head_dim, half,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def rotate_and_write(
    qkv: Tensor,
    heads: Heads,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    write_kv: Callable[[Tensor, Tensor, Tensor, int, Tensor], None],
) -> Tensor:
    """The queries [tokens, heads, head_dim] of qkv [tokens, heads + 2 * kv_heads, head_dim], whose rest is written.

    A head of qkv is dense; `write_kv` and its arguments are as in `Attention`. On a GPU, a pool of qkv's dtype does
    not need it.
    """
    if qkv.is_cuda and pool.dtype == qkv.dtype:
        return _triton().rotate_and_write(qkv, heads, pool, layer, slots)  # type: ignore[no-any-return]
    num_queries = qkv.shape[1] - 2 * pool.shape[1]
    qk, value = qkv.tensor_split([qkv.shape[1] - pool.shape[1]], dim=1)
    if heads.norm is not None:
        qk = rms_norm(qk, None, heads.eps) * heads.norm
    if heads.rotation is not None:
        qk = rotate(qk, *heads.rotation)
    if heads.norm_after:
        qk = rms_norm(qk, None, heads.eps)
    query, key = qk[:, :num_queries], qk[:, num_queries:]
    write_kv(pool, key, value, layer, slots)
    return query


def _native(*tensors: Tensor | None) -> bool:
    plain = all(each is None or (each.dtype == torch.float32 and each.device.type == "cpu") for each in tensors)
    return plain and library() is not None


def _triton() -> ModuleType:
    from workers.ops import triton_fused  # only where Triton is installed: torch for CUDA brings it

    return triton_fused
