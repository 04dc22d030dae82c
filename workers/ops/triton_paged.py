"""Paged attention in Triton: prompt chunks, decodes split over their keys, windows, soft caps, grouped KV heads.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).

    spans of SPLIT keys   | 0 .. 255 | 256 .. 511 | ...    a span's state: largest score, sums of weights and values
    decode                  program    program      ...    one program for each span, then one that merges the states
    prompt chunk            one program for all spans, which are longer; so is a decode, among many sequences

The invariant variant computes a span by the same operations in both kernels, with as many rows, and merges states from
left to right: a row's bits depend neither on its batch nor on how its prompt was cut. It is compiled without fused
multiply-adds: the compiler would fuse the scale of scores with what follows, but not where a mask lies between. The
other has fewer rows for a decode and more for a chunk.

Sources: Dao et al., FlashAttention (2022); Flash-Decoding (2023).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.ops.batch import RaggedBatch, Scoring
from workers.ops.narrow import LARGEST, to_slots

SPLIT = 256  # keys of a span
LONG_SPLIT = 2048  # of decodes that fill the device with so many programs, about three for each multiprocessor:
PROGRAMS = 384
TILE_BYTES = 32 << 10  # of rows or keys: shared memory holds several tiles
STATE_BYTES = 256 << 20  # of the spans' states at a time
LOG2_E = 1.4426950408889634  # weights are powers of 2
# Arguments that differ from step to step or layer to layer. Triton would compile a kernel again for 1, for multiples of
# 16, and for each alignment of a table's rows; none of it makes these kernels faster.
VARYING = ["layer", "table_stride"]
TABLES = ["query_starts", "context_lens", "block_tables"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a kernel. `rows`: (query, head of the group) pairs of a program; `keys`: of one matrix product."""

    rows: int
    keys: int
    warps: int
    stages: int


INVARIANT = Tile(rows=64, keys=64, warps=4, stages=3)
DECODE = Tile(rows=16, keys=128, warps=4, stages=3)
CHUNK = Tile(rows=128, keys=128, warps=8, stages=2)


def write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """See `attention.Attention`."""
    _, kv_heads, layers, _, block_size, slot_size = pool.shape
    key, value = (to_slots(each, pool.dtype) for each in (key, value))
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
    _write[(key.shape[0], kv_heads)](
        pool, key, value, slot_mapping, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        layer, layers, block_size, slot_size, SIZE=triton.next_power_of_2(slot_size),
    )  # fmt: skip


def attend(
    query: Tensor,
    pool: Tensor,
    layer: int,
    batch: RaggedBatch,
    scoring: Scoring,
    *,
    invariant: bool = False,
) -> Tensor:
    """See `attention.Attend`; `invariant` as in the module's text."""
    _, kv_heads, layers, _, block_size, slot_size = pool.shape
    heads, head_dim = query.shape[1:]
    group = heads // kv_heads
    query = query if query.stride(2) == 1 else query.contiguous()
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    sizes = {
        "LAYERS": layers,
        "KV_HEADS": kv_heads,
        "BLOCK": block_size,
        "SLOT": slot_size,
        "HEAD_DIM": head_dim,
        "WINDOW": scoring.window,
        "GROUP": group,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "CAPPED": scoring.softcap != 0.0,
        "SCALED": pool.dtype in LARGEST,
    }
    tile_bytes = TILE_BYTES if query.element_size() == 2 else TILE_BYTES // 4  # no tensor cores: more registers
    most = max(16, tile_bytes // (sizes["DIM"] * query.element_size()))
    softcap, sinks = scoring.softcap, scoring.sinks
    scale = scoring.scale if softcap else scoring.scale * LOG2_E
    sequences, decodes = len(batch.context_lens), batch.num_decodes
    split = LONG_SPLIT if not invariant and decodes * kv_heads >= PROGRAMS else SPLIT
    splits = triton.cdiv(batch.max_context, split)
    runs = [(decodes, sequences, batch.max_query, INVARIANT if invariant else CHUNK)]
    if split == LONG_SPLIT and splits == 1:
        runs, decodes = [(0, decodes, 1, DECODE), *runs], 0  # there is nothing to merge
    step = max(1, STATE_BYTES // (4 * heads * splits * (head_dim + 2)))  # decodes whose states fit
    for first in range(0, decodes, step):
        rows = slice(first, min(first + step, decodes))
        starts, contexts, tables = batch.query_starts[first:], batch.context_lens[rows], batch.block_tables[rows]
        states = query.new_empty(len(contexts), heads, splits, head_dim + 2, dtype=torch.float32)
        tile = INVARIANT if invariant else DECODE
        _attend_span[(splits, kv_heads, len(contexts))](
            query, query.stride(0), query.stride(1), states, pool, starts, contexts, tables, tables.stride(0),
            layer, scale, softcap, **sizes, SPLIT=split,
            ROWS=max(min(tile.rows, most), triton.next_power_of_2(group)), KEYS=min(tile.keys, most),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=not invariant,
        )  # fmt: skip
        _merge_spans[(heads, len(contexts))](
            states, output, starts, contexts, sinks, splits, HEAD_DIM=head_dim, WINDOW=scoring.window,
            SPLIT=split, DIM=sizes["DIM"], SINKS=sinks is not None, num_warps=1, enable_fp_fusion=not invariant,
        )  # fmt: skip
    for first, stop, longest, tile in runs:
        if first == stop:
            continue
        queries = max(1, min(tile.rows, most) // group)  # of one program
        _attend_chunk[(triton.cdiv(longest, queries), kv_heads, stop - first)](
            query, query.stride(0), query.stride(1), output, pool, batch.query_starts[first:],
            batch.context_lens[first:], batch.block_tables[first:], batch.block_tables.stride(0),
            sinks, layer, scale, softcap, **sizes, SPLIT=SPLIT, QUERIES=queries, WHOLE=not invariant,
            SINKS=sinks is not None,
            ROWS=max(min(tile.rows, most), triton.next_power_of_2(group)), KEYS=min(tile.keys, most),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=not invariant,
        )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    pool, key, value, slots, key_token, key_head, value_token, value_head, layer, layers, block_size, slot_size,
    SIZE: tl.constexpr,
):  # fmt: skip
    token, head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + token)
    half = ((slot // block_size * kv_heads + head) * layers + layer) * 2
    at = tl.arange(0, SIZE)
    to = pool + (half * block_size + slot % block_size) * slot_size + at
    tl.store(to, tl.load(key + token * key_token + head * key_head + at, at < slot_size), at < slot_size)
    to += block_size * slot_size
    tl.store(to, tl.load(value + token * value_token + head * value_head + at, at < slot_size), at < slot_size)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=TABLES)  # type: ignore[untyped-decorator]
def _attend_chunk(  # type: ignore[no-untyped-def]
    query, query_token_stride, query_head_stride, output, pool, query_starts, context_lens, block_tables, table_stride,
    sinks, layer, scale, softcap, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
    WHOLE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """QUERIES queries of one sequence and KV head over all spans."""
    tile, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - start
    # The last tiles have the most keys: they start first.
    first = (tl.cdiv(length, QUERIES) - 1 - tile) * QUERIES
    if first >= 0:
        context = tl.load(context_lens + sequence)
        row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
        nth, head = first + row // GROUP, kv_head * GROUP + row % GROUP
        real = (row < QUERIES * GROUP) & (nth < length)
        position = context - length + nth
        inside = real[:, None] & (dim < HEAD_DIM)[None, :]
        token = (start + nth).to(tl.int64)
        at = token * query_token_stride + head * query_head_stride
        queries = tl.load(query + at[:, None] + dim[None, :], inside, 0.0)  # [ROWS, DIM]

        end = tl.minimum(context, context - length + first + QUERIES)
        table = block_tables + sequence * table_stride
        if WHOLE:
            most, total, summed = _span(
                queries, position, pool, table, _first_key(context - length + first, WINDOW, KEYS), end,
                kv_head, layer, scale, softcap, LAYERS, KV_HEADS, BLOCK, SLOT, HEAD_DIM, WINDOW,
                ROWS, KEYS, DIM, CAPPED, SCALED, True,
            )  # fmt: skip
        else:
            most = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            summed = tl.zeros([ROWS, DIM], tl.float32)
            for span in range(_first_key(context - length + first, WINDOW, SPLIT), end, SPLIT):
                span_most, span_total, span_summed = _span(
                    queries, position, pool, table, span, tl.minimum(span + SPLIT, end),
                    kv_head, layer, scale, softcap, LAYERS, KV_HEADS, BLOCK, SLOT, HEAD_DIM, WINDOW,
                    ROWS, KEYS, DIM, CAPPED, SCALED, True,
                )  # fmt: skip
                greater = tl.maximum(most, span_most)
                base = tl.where(greater == float("-inf"), 0.0, greater)  # a row without visible keys so far
                kept, added = tl.exp2(most - base), tl.exp2(span_most - base)
                total = total * kept + span_total * added
                summed = summed * kept[:, None] + span_summed * added[:, None]
                most = greater
        if SINKS:
            kept, total = _with_sink(most, total, tl.load(sinks + head, real, 0.0))
            summed *= kept[:, None]
        answer = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        to = (token * KV_HEADS * GROUP + head) * HEAD_DIM
        tl.store(output + to[:, None] + dim[None, :], answer.to(queries.dtype), inside)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=TABLES)  # type: ignore[untyped-decorator]
def _attend_span(  # type: ignore[no-untyped-def]
    query, query_token_stride, query_head_stride, states, pool, query_starts, context_lens, block_tables, table_stride,
    layer, scale, softcap, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The state of one span, for the one query of a sequence: states [sequence, head, span, head_dim + 2]."""
    span, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + sequence)
    begin = span * SPLIT
    if (begin < context) & (begin >= _first_key(context - 1, WINDOW, SPLIT)):
        row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
        head = kv_head * GROUP + row
        real = row < GROUP
        inside = real[:, None] & (dim < HEAD_DIM)[None, :]
        token = tl.load(query_starts + sequence).to(tl.int64)
        at = token * query_token_stride + head * query_head_stride
        queries = tl.load(query + at[:, None] + dim[None, :], inside, 0.0)  # [ROWS, DIM]
        position = tl.full([ROWS], 0, tl.int32) + context - 1
        most, total, summed = _span(
            queries, position, pool, block_tables + sequence * table_stride, begin, tl.minimum(begin + SPLIT, context),
            kv_head, layer, scale, softcap, LAYERS, KV_HEADS, BLOCK, SLOT, HEAD_DIM, WINDOW,
            ROWS, KEYS, DIM, CAPPED, SCALED, False,
        )  # fmt: skip
        state = (sequence.to(tl.int64) * KV_HEADS * GROUP + head) * tl.num_programs(0) + span
        to = states + state * (HEAD_DIM + 2)
        tl.store(to, most, real)
        tl.store(to + 1, total, real)
        tl.store(to[:, None] + 2 + dim[None, :], summed, inside)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=TABLES[:2])  # type: ignore[untyped-decorator]
def _merge_spans(  # type: ignore[no-untyped-def]
    states,
    output,
    query_starts,
    context_lens,
    sinks,
    splits,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The states of one sequence and head merged from left to right, as `_attend_chunk` merges them."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + sequence)
    dim = tl.arange(0, DIM)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([DIM], tl.float32)
    first = states + ((sequence.to(tl.int64) * tl.num_programs(0) + head) * splits) * (HEAD_DIM + 2)
    begin = _first_key(context - 1, WINDOW, SPLIT) // SPLIT
    for span in tl.range(begin, tl.cdiv(context, SPLIT), loop_unroll_factor=4):  # loads of four at a time
        state = first + span * (HEAD_DIM + 2)
        span_most, span_total = tl.load(state + tl.arange(0, 1)), tl.load(state + 1 + tl.arange(0, 1))
        span_summed = tl.load(state + 2 + dim, dim < HEAD_DIM, 0.0)
        greater = tl.maximum(most, span_most)
        base = tl.where(greater == float("-inf"), 0.0, greater)
        kept, added = tl.exp2(most - base), tl.exp2(span_most - base)
        total = total * kept + span_total * added
        summed = summed * kept + span_summed * added
        most = greater
    if SINKS:
        kept, total = _with_sink(most, total, tl.load(sinks + head + tl.arange(0, 1)))
        summed *= kept
    answer = summed / tl.where(total == 0.0, 1.0, total)
    to = (tl.load(query_starts + sequence).to(tl.int64) * tl.num_programs(0) + head) * HEAD_DIM
    tl.store(output + to + dim, answer.to(output.dtype.element_ty), dim < HEAD_DIM)


@triton.jit
def _with_sink(most, total, sink):  # type: ignore[no-untyped-def]
    """(factor of the summed values, sum of the weights) after one more key, without a value."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    greater = tl.maximum(most, sink)
    kept = tl.exp2(most - greater)
    return kept, total * kept + tl.exp2(sink - greater)


@triton.jit  # type: ignore[untyped-decorator]
def _first_key(position, WINDOW: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the span begins that has the first key that a query sees."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, position - WINDOW + 1) // SPLIT * SPLIT
    elif WINDOW < 0:
        begin = position // -WINDOW * -WINDOW // SPLIT * SPLIT
    return begin


@triton.jit  # type: ignore[untyped-decorator]
def _span(  # type: ignore[no-untyped-def]
    queries, position, pool, table, begin, end, kv_head,
    layer, scale, softcap, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, UNMASKED: tl.constexpr,
):  # fmt: skip
    """The state of queries [ROWS, DIM] at `position` [ROWS] after the keys begin .. end of a sequence."""
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    masked = begin
    if UNMASKED and WINDOW == 0:  # all queries see all keys of the tiles before the first query
        masked = begin + tl.maximum(0, tl.minimum(tl.min(position) + 1, end) - begin) // KEYS * KEYS
        for first in range(begin, masked, KEYS):
            most, total, summed = _tile(
                most, total, summed, queries, position, pool, table, first, end, kv_head, layer, scale, softcap,
                LAYERS, KV_HEADS, BLOCK, SLOT, HEAD_DIM, WINDOW, KEYS, DIM, CAPPED, SCALED, MASKED=False,
            )  # fmt: skip
    for first in range(masked, end, KEYS):
        most, total, summed = _tile(
            most, total, summed, queries, position, pool, table, first, end, kv_head, layer, scale, softcap,
            LAYERS, KV_HEADS, BLOCK, SLOT, HEAD_DIM, WINDOW, KEYS, DIM, CAPPED, SCALED, MASKED=True,
        )  # fmt: skip
    return most, total, summed


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    most, total, summed, queries, position, pool, table, first, end, kv_head,
    layer, scale, softcap, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state after KEYS more keys, from `first` on; MASKED: some of them may be hidden from some queries."""
    dim = tl.arange(0, DIM)
    key_at = first + tl.arange(0, KEYS)
    known = key_at < end
    block = tl.load(table + key_at // BLOCK, known, 0).to(tl.int64)
    half = ((block * KV_HEADS + kv_head) * LAYERS + layer) * 2
    slot = (half * BLOCK + key_at % BLOCK) * SLOT  # [KEYS]
    slot = tl.multiple_of(slot, SLOT & -SLOT)  # Triton 3.6 takes a quantized slot of 132 bytes to be aligned better
    readable = known[:, None] & (dim < HEAD_DIM)[None, :]
    where = pool + slot[:, None] + dim[None, :]
    keys = tl.load(where, readable, 0.0).to(queries.dtype)  # [KEYS, DIM]
    values = tl.load(where + BLOCK * SLOT, readable, 0.0).to(queries.dtype)

    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # [ROWS, KEYS] in float32
    scores = _scaled(scores, pool + slot + HEAD_DIM, known, SCALED)
    if CAPPED:
        scores = softcap * 1.4426950408889634 * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
    if MASKED:
        seen = known[None, :] & (key_at[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key_at[None, :] > position[:, None] - WINDOW)
        elif WINDOW < 0:
            seen = seen & (key_at[None, :] >= position[:, None] // -WINDOW * -WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    greater = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(greater == float("-inf"), 0.0, greater) if MASKED else greater  # a row may have seen no key so far
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(most - base)
    total = total * kept + tl.sum(weights, 1)
    weights = _scaled(weights, pool + slot + BLOCK * SLOT + HEAD_DIM, known, SCALED)
    summed = summed * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return greater, total, summed


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(numbers, scales, known, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns times the scales of their keys, if the pool has any; `scales` point to their first bytes."""
    if SCALED:
        numbers *= tl.load(scales.to(tl.pointer_type(tl.float32), bitcast=True), known, 0.0)[None, :]
    return numbers
