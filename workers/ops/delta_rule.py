"""The gated delta rule over paged state, and the causal convolution before it: a token after the other.

The state after a sequence's first p tokens is in the block of token p - 1; whatever a step computes, it leaves in each
block the state after the last token there. So a sequence may go on at each block's end, and at its own last token.

    x_t = silu(sum of w_j * mixed_(t - kernel + 1 + j))                        of each channel
    S_t = decay_t * S_(t-1) + k_t (beta_t * (v_t - k_t decay_t * S_(t-1)))     of each value head: [key_dim, value_dim]
    o_t = q_t S_t

Native kernels compute it on a CPU, Triton's on a GPU, torch elsewhere; all in float32. With kernels a row's bits depend
neither on how its prompt is cut nor on other rows. Source: Yang et al., Gated Delta Networks (2025).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops.batch import RaggedBatch
from workers.ops.fused import rms_norm
from workers.ops.native.library import kernel, library, pointer

_EPS = 1e-6  # of the L2 norms of q and k


@dataclass(frozen=True, slots=True)
class Gates:
    """What `gated_delta_rule` computes decay and beta from: exp(rate * softplus(a + bias)), and sigmoid(b)."""

    a: Tensor  # [tokens, value_heads] float32
    b: Tensor  # [tokens, value_heads] float32
    rate: Tensor  # [value_heads] float32, negative
    bias: Tensor  # [value_heads] float32


def causal_conv(mixed: Tensor, weight: Tensor, states: Tensor, batch: RaggedBatch, block_size: int) -> Tensor:
    """silu of the convolution of mixed [tokens, kv_heads, channels] with weight [kv_heads, kernel, channels].

    `states` [blocks, kv_heads, (kernel - 1) * channels]: the inputs before the next token. All in float32; reads and
    writes `states`.
    """
    mixed, (_, kv_heads, channels) = mixed.contiguous(), mixed.shape
    if mixed.is_cuda:
        return _triton().causal_conv(mixed, weight, states, batch, block_size)  # type: ignore[no-any-return]
    output, taps = torch.empty_like(mixed), weight.shape[1]
    if _is_native(mixed):
        kernel("causal_conv")(
            pointer(mixed), pointer(weight), pointer(output), kv_heads, channels, taps,
            *_paged(states, batch, block_size),
        )  # fmt: skip
        return output
    paged = torch.unflatten(states, -1, (taps - 1, channels))
    for first, end, runs in _sequences(batch, block_size):
        source = runs[0][2]
        before = torch.zeros_like(paged[0]) if source is None else paged[source]
        x = torch.cat([before.transpose(0, 1), mixed[first:end]])  # [taps - 1 + tokens, kv_heads, channels]
        total = sum(x[tap : tap + end - first] * weight[:, tap] for tap in range(taps))
        assert isinstance(total, Tensor)
        output[first:end] = total / (-total).exp_().add_(1.0)
        for _, stop, _, target in runs:
            paged[target] = x[stop - first : stop - first + taps - 1].transpose(0, 1)
    return output


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, gates: Gates, states: Tensor, batch: RaggedBatch, block_size: int
) -> Tensor:
    """The outputs o [tokens, value_heads, value_dim] for query and key [tokens, key_heads, key_dim] and their values.

    Normalizes q and k, and scales q by key_dim ** -0.5. `states` [blocks, kv_heads, value_heads / kv_heads * key_dim *
    value_dim]. All in float32; reads and writes `states`.
    """
    size = key.shape[-1]
    query = rms_norm(query, None, _EPS / size) / size  # a root mean square is a length / sqrt(size)
    key = rms_norm(key, None, _EPS / size) / size**0.5
    _, value_heads, value_dim = value.shape
    value = value.contiguous()
    if value.is_cuda:
        numbers = (query, key, value, gates.a, gates.b, gates.rate, gates.bias)
        return _triton().gated_delta_rule(*numbers, states, batch, block_size)  # type: ignore[no-any-return]
    output, kv_heads = torch.empty(value.shape), states.shape[1]
    if _is_native(value):
        kernel("delta_rule")(
            *(pointer(each) for each in (query, key, value, gates.a, gates.b, gates.rate, gates.bias, output)),
            kv_heads, key.shape[1], value_heads, size, value_dim, *_paged(states, batch, block_size),
        )  # fmt: skip
        return output
    decay = (gates.rate * F.softplus(gates.a + gates.bias)).exp()[..., None, None]  # [tokens, value_heads, 1, 1]
    beta = (-gates.b).exp().add_(1.0).reciprocal_()[..., None]  # [tokens, value_heads, 1]
    query, key = (each.repeat_interleave(value_heads // key.shape[1], dim=1)[..., None] for each in (query, key))
    paged = torch.unflatten(states, -1, (value_heads // kv_heads, size, value_dim))
    for _, _, runs in _sequences(batch, block_size):
        source = runs[0][2]
        state = torch.zeros_like(paged[0]) if source is None else paged[source]
        state = state.flatten(0, 1)  # [value_heads, key_dim, value_dim]
        for start, stop, _, target in runs:
            for row in range(start, stop):
                state = state * decay[row]
                delta = (value[row] - (state * key[row]).sum(-2)) * beta[row]
                state = state + key[row] * delta[:, None]
                output[row] = (state * query[row]).sum(-2)
            paged[target] = state.view(paged[target].shape)
    return output


Run = tuple[int, int, int | None, int]  # rows [start, stop) in one block; the block of the state before, and their own


def _sequences(batch: RaggedBatch, block_size: int) -> Iterator[tuple[int, int, list[Run]]]:
    """The rows [first, end) of each sequence, and its runs."""
    starts, contexts, tables = (each.tolist() for each in (batch.query_starts, batch.context_lens, batch.block_tables))
    for first, end, context, table in zip(starts, starts[1:], contexts, tables, strict=False):
        position, row, runs = context - (end - first), first, list[Run]()
        while row < end:
            stop = min(end, row + block_size - position % block_size)
            runs.append(
                (row, stop, table[(position - 1) // block_size] if position else None, table[position // block_size])
            )
            row, position = stop, position + stop - row
        yield first, end, runs


def _triton() -> ModuleType:
    from workers.ops import triton_delta  # only where Triton is installed: torch for CUDA brings it

    return triton_delta


def _is_native(x: Tensor) -> bool:
    return x.device.type == "cpu" and library() is not None


def _paged(states: Tensor, batch: RaggedBatch, block_size: int) -> tuple[int, ...]:
    """The last arguments of both kernels: strides count numbers."""
    tables = batch.block_tables
    return (
        pointer(states), states.stride(0), states.stride(1), pointer(batch.query_starts), pointer(batch.context_lens),
        pointer(tables), tables.shape[1], tables.shape[0], block_size, torch.get_num_threads(),
    )  # fmt: skip
