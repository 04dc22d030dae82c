"""Paged attention as one Triton kernel: decodes and prompt chunks, windows, soft caps, grouped KV heads.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1). So far it has only run in the interpreter, never on a
GPU; its speed is unknown. Each program takes ROWS rows of one sequence and KV head and loops over its keys in tiles
from position 0, so a row does not depend on its batch as long as the tile product does not. Torch's own paged kernel
(`torch.nn.attention.varlen`) needs FlashAttention 3 or 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.ops.batch import RaggedBatch
from workers.ops.narrow import to_slots

ROWS = 64  # (query, head of the group) pairs per program
KEYS = 64  # of one tile


def write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """See `attention.Attention`."""
    _, kv_heads, layers, _, block_size, slot_size = pool.shape
    key, value = (to_slots(each, pool.dtype).contiguous() for each in (key, value))
    _write[(key.shape[0], kv_heads)](
        pool, key, value, slot_mapping, layer, layers, block_size, slot_size, SIZE=triton.next_power_of_2(slot_size)
    )


def attend(
    query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scale: float, window: int, softcap: float
) -> Tensor:
    """See `attention.Attend`."""
    _, kv_heads, layers, _, block_size, slot_size = pool.shape
    heads, head_dim = query.shape[1:]
    group = heads // kv_heads
    queries = max(1, ROWS // group)  # of one program
    query = query if query.stride(2) == 1 else query.contiguous()
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(batch.max_query, queries), kv_heads, batch.block_tables.shape[0])
    _attend[grid](
        query,
        query.stride(0),
        query.stride(1),
        output,
        pool,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        layer,
        layers,
        kv_heads,
        block_size,
        slot_size,
        head_dim,
        scale,
        window,
        softcap,
        GROUP=group,
        QUERIES=queries,
        ROWS=max(ROWS, triton.next_power_of_2(group)),
        KEYS=KEYS,
        DIM=max(16, triton.next_power_of_2(head_dim)),
        CAPPED=softcap != 0.0,
        SCALED=pool.dtype == torch.int8,
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _write(pool, key, value, slots, layer, layers, block_size, slot_size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    token, head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + token)
    half = ((slot // block_size * kv_heads + head) * layers + layer) * 2
    at = tl.arange(0, SIZE)
    from_ = (token * kv_heads + head) * slot_size + at
    to = pool + (half * block_size + slot % block_size) * slot_size + at
    tl.store(to, tl.load(key + from_, at < slot_size), at < slot_size)
    tl.store(to + block_size * slot_size, tl.load(value + from_, at < slot_size), at < slot_size)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(numbers, scales, known, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns times the scales of their keys, if the pool has any; `scales` point to their first bytes."""
    if SCALED:
        numbers *= tl.load(scales.to(tl.pointer_type(tl.float32), bitcast=True), known, 0.0)[None, :]
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    query_token_stride,
    query_head_stride,
    output,
    pool,
    query_starts,
    context_lens,
    block_tables,
    table_stride,
    layer,
    layers,
    kv_heads,
    block_size,
    slot_size,
    head_dim,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
):
    tile, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - start
    first = tile * QUERIES
    if first < length:
        context = tl.load(context_lens + sequence)
        row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
        nth, head = first + row // GROUP, kv_head * GROUP + row % GROUP
        real = (row < QUERIES * GROUP) & (nth < length)
        position = context - length + nth
        inside = real[:, None] & (dim < head_dim)[None, :]
        token = (start + nth).to(tl.int64)
        at = token * query_token_stride + head * query_head_stride
        queries = tl.load(query + at[:, None] + dim[None, :], inside, 0.0)  # [ROWS, DIM]

        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        end = tl.minimum(context, context - length + first + QUERIES)
        begin = 0
        if window > 0:
            begin = tl.maximum(0, context - length + first - window + 1) // KEYS * KEYS
        for tile_begin in range(begin, end, KEYS):
            key_at = tile_begin + tl.arange(0, KEYS)
            known = key_at < end
            block = tl.load(block_tables + sequence * table_stride + key_at // block_size, known, 0).to(tl.int64)
            half = ((block * kv_heads + kv_head) * layers + layer) * 2
            slot = (half * block_size + key_at % block_size) * slot_size  # [KEYS]
            readable = known[:, None] & (dim < head_dim)[None, :]
            where = pool + slot[:, None] + dim[None, :]
            keys = tl.load(where, readable, 0.0).to(queries.dtype)  # [KEYS, DIM]
            values = tl.load(where + block_size * slot_size, readable, 0.0).to(queries.dtype)

            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # [ROWS, KEYS] in float32
            scores = _scaled(scores, pool + slot + head_dim, known, SCALED)
            if CAPPED:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
            seen = known[None, :] & (key_at[None, :] <= position[:, None])
            if window > 0:
                seen = seen & (key_at[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            greater = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(greater == float("-inf"), 0.0, greater)  # a row without visible keys so far
            weights = tl.exp(scores - base[:, None])
            kept = tl.exp(most - base)
            total = total * kept + tl.sum(weights, 1)
            weights = _scaled(weights, pool + slot + block_size * slot_size + head_dim, known, SCALED)
            summed = summed * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            most = greater
        answer = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        to = (token * kv_heads * GROUP + head) * head_dim
        tl.store(output + to[:, None] + dim[None, :], answer.to(queries.dtype), inside)
