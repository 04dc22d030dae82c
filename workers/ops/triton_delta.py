"""The gated delta rule and the convolution before it as Triton kernels: see `workers.ops.delta_rule`.

A program computes some channels, or some features of a value head, of one sequence: token after token, with the state
of the rule in registers. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.ops.batch import RaggedBatch

_CHANNELS = 256  # of a program of the convolution
_FEATURES = 32  # of a program of the rule: its part of the state is [key_dim, 32]


def causal_conv(mixed: Tensor, weight: Tensor, states: Tensor, batch: RaggedBatch, block_size: int) -> Tensor:
    """See `delta_rule.causal_conv`."""
    _, kv_heads, channels = mixed.shape
    taps, output = weight.shape[1], torch.empty_like(mixed)
    assert block_size >= taps - 1, "the inputs before a token lie in its block and the one before"
    _conv[(len(batch.block_tables), kv_heads, triton.cdiv(channels, _CHANNELS))](
        mixed, weight, output, *_paged(states, batch), block_size, kv_heads, channels, CHANNELS=_CHANNELS, TAPS=taps
    )
    return output


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    bias: Tensor,
    states: Tensor,
    batch: RaggedBatch,
    block_size: int,
) -> Tensor:
    """As `delta_rule.gated_delta_rule`, with q and k normalized and scaled already."""
    _, heads, dim = value.shape
    output, key_dim = torch.empty_like(value), key.shape[2]
    _rule[(len(batch.block_tables), heads, triton.cdiv(dim, _FEATURES))](
        query, key, value, a, b, rate, bias, output, *_paged(states, batch), block_size,
        states.shape[1], key.shape[1], heads, key_dim, dim, KEYS=triton.next_power_of_2(key_dim), FEATURES=_FEATURES,
    )  # fmt: skip
    return output


def _paged(states: Tensor, batch: RaggedBatch) -> tuple[Tensor | int, ...]:
    tables = batch.block_tables
    return states, states.stride(0), states.stride(1), batch.query_starts, batch.context_lens, tables, tables.stride(0)


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _conv(  # type: ignore[no-untyped-def]
    mixed, weight, output, states, block_stride, head_stride, starts, contexts, tables, table_stride, block_size,
    kv_heads, channels, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside, zeros = at < channels, tl.zeros((CHANNELS,), tl.int32)  # vectors: the interpreter masks with no scalar
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    begin = tl.load(contexts + sequence) - (end - first)  # position of the first row
    table = tables + sequence * table_stride
    before = tl.load(table + tl.maximum(begin - 1, 0) // block_size).to(tl.int64)
    history = states + before * block_stride + head * head_stride + at
    row = first
    while row < end:
        total = tl.zeros((CHANNELS,), tl.float32)
        for tap in tl.static_range(TAPS):
            source = zeros + row - (TAPS - 1) + tap
            offset = (source.to(tl.int64) * kv_heads + head) * channels
            here = tl.load(mixed + offset + at, inside & (source >= first), 0.0)
            past = inside & (source < first) & (zeros + begin > 0)
            there = tl.load(history + (TAPS - 1 + source - first) * channels, past, 0.0)
            total += tl.load(weight + (head * TAPS + tap) * channels + at, inside, 0.0) * (here + there)
        target = output + (row.to(tl.int64) * kv_heads + head) * channels + at
        tl.store(target, total / (1.0 + tl.exp(-total)), inside)
        row += 1
    row = first
    while row < end:
        position = begin + row - first
        if (position + 1) % block_size == 0 or row + 1 == end:
            block = tl.load(table + position // block_size).to(tl.int64)
            kept = states + block * block_stride + head * head_stride + at
            for tap in tl.static_range(TAPS - 1):  # ascending: what is still needed lies behind what is overwritten
                source = zeros + row - (TAPS - 2) + tap
                offset = (source.to(tl.int64) * kv_heads + head) * channels
                here = tl.load(mixed + offset + at, inside & (source >= first), 0.0)
                past = inside & (source < first) & (zeros + begin > 0)
                there = tl.load(history + (TAPS - 1 + source - first) * channels, past, 0.0)
                tl.store(kept + tap * channels, here + there, inside)
        row += 1


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _rule(  # type: ignore[no-untyped-def]
    query, key, value, a, b, rate, bias, output, states, block_stride, head_stride, starts, contexts, tables,
    table_stride, block_size, kv_heads, key_heads, heads, key_dim, dim, KEYS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    at, line = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES), tl.arange(0, KEYS)
    inside, real = at < dim, line < key_dim
    whole = real[:, None] & inside[None, :]
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    begin = tl.load(contexts + sequence) - (end - first)
    table, group = tables + sequence * table_stride, heads // kv_heads
    own = states + head // group * head_stride + head % group * key_dim * dim + line[:, None] * dim + at[None, :]
    before = tl.load(table + tl.maximum(begin - 1, 0) // block_size).to(tl.int64)
    state = tl.load(own + before * block_stride, whole & (line * 0 + begin > 0)[:, None], 0.0)
    head_rate, head_bias = tl.load(rate + head), tl.load(bias + head)
    row = first
    while row < end:
        place = row.to(tl.int64) * heads + head
        reader = (row.to(tl.int64) * key_heads + head * key_heads // heads) * key_dim + line
        k, q = tl.load(key + reader, real, 0.0), tl.load(query + reader, real, 0.0)
        x = tl.load(a + place) + head_bias
        decay = tl.exp(head_rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + place)))
        state *= decay
        delta = (tl.load(value + place * dim + at, inside, 0.0) - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * delta[None, :]
        tl.store(output + place * dim + at, tl.sum(state * q[:, None], 0), inside)
        position = begin + row - first
        if (position + 1) % block_size == 0 or row + 1 == end:
            block = tl.load(table + position // block_size).to(tl.int64)
            tl.store(own + block * block_stride, state, whole)
        row += 1
