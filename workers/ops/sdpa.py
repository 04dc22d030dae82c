"""Paged attention with torch's SDPA: one padded call for all decodes, one call per prompt chunk.

Reads and writes the pool as rows of a matrix, which is twenty times faster than indexing its six axes. Needs a
contiguous pool; runs wherever torch does. For backends that attend to whole sequences only, it also attends in parts,
from state to state (`workers.ops.batch`): right within rounding, not bit for bit.
"""

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops.batch import KeySpan, RaggedBatch, Scoring, first_key
from workers.ops.narrow import LARGEST, from_slots, to_slots

KEYS = 1024  # of a part at a time: bounds the memory for scores


def write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """See `attention.Attention`."""
    block_size, slot_size = pool.shape[4:]
    table = slot_mapping // block_size
    rows = _first_rows(pool, layer, table[:, None]) * block_size + (slot_mapping % block_size)[:, None]
    rows = rows.flatten()  # [tokens * kv_heads]: the row of each K vector; its V is block_size rows further
    slots = pool.view(-1, slot_size)
    slots[rows] = to_slots(key, pool.dtype).reshape(-1, slot_size)
    if pool.shape[3] == 2:
        slots[rows + block_size] = to_slots(value, pool.dtype).reshape(-1, slot_size)


def attend(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
    """See `attention.Attend`."""
    context_lens, starts, block_tables = batch.context_lens.tolist(), batch.query_starts.tolist(), batch.block_tables
    if abs(scoring.window) >= batch.max_context:
        scoring = replace(scoring, window=0)
    query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
    num_decodes = next((row for row, length in enumerate(query_lens) if length > 1), len(query_lens))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_decodes:
        rows = slice(0, num_decodes)
        contexts = batch.context_lens[rows]
        output[rows] = _decode(query[rows], pool, layer, block_tables[rows], contexts, scoring)
    for row in range(num_decodes, len(query_lens)):
        run = slice(starts[row], starts[row + 1])
        table, context = block_tables[row], context_lens[row]
        output[run] = _chunk(query[run], pool, layer, table, context, scoring)
    return output


def _decode(query: Tensor, pool: Tensor, layer: int, tables: Tensor, context_lens: Tensor, scoring: Scoring) -> Tensor:
    """One query token per sequence. The query heads of a KV head become its queries, so K and V are not repeated."""
    batch, heads, head_dim = query.shape
    kv_heads = pool.shape[1]
    longest = int(context_lens.max())
    key, value = gather(pool, layer, tables, longest, query.dtype)  # [batch, kv_heads, longest, head_dim]
    at = torch.arange(longest, device=query.device)
    visible = at < context_lens[:, None]  # [batch, longest]
    if scoring.window:
        visible &= at >= first_key(context_lens[:, None] - 1, scoring.window)
    folded = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    output = _masked(folded, key, value, visible[:, None, None], scoring)
    return output.reshape(batch, heads, head_dim)


def _chunk(query: Tensor, pool: Tensor, layer: int, table: Tensor, context: int, scoring: Scoring) -> Tensor:
    """A chunk of one prompt. The kernel's own causal mask serves only a chunk without a prefix before it."""
    length, heads, head_dim = query.shape
    key, value = gather(pool, layer, table[None], context, query.dtype)  # [1, kv_heads, context, head_dim]
    queries = query.transpose(0, 1)[None]  # [1, heads, length, head_dim]
    if length == context and not (scoring.window or scoring.softcap or scoring.sinks is not None):
        output = F.scaled_dot_product_attention(
            queries, key, value, is_causal=True, scale=scoring.scale, enable_gqa=True
        )
        return output[0].transpose(0, 1)
    visible = torch.ones(length, context, dtype=torch.bool, device=query.device).tril(context - length)
    if scoring.window:
        at = torch.arange(context, device=query.device)
        visible &= at >= first_key(at[context - length :, None], scoring.window)
    group = heads // key.shape[1]
    folded = queries.reshape(1, -1, group * length, head_dim)
    output = _masked(folded, key, value, visible.repeat(group, 1)[None, None], scoring)
    return output.reshape(heads, length, head_dim).transpose(0, 1)


def _masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """Attention where `visible`; SDPA has no soft cap and no sinks."""
    sinks = scoring.sinks
    if not scoring.softcap and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scoring.scale)
    scores = scoring.capped(query @ key.transpose(2, 3) * scoring.scale)  # [batch, kv_heads, heads and queries, keys]
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        queries = scores.shape[1] * scores.shape[2] // len(sinks)  # of a head
        last = sinks.repeat_interleave(queries).view(*scores.shape[1:3], 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, last], dim=-1)
    return scores.softmax(dim=-1)[..., : key.shape[2]] @ value


def gather(pool: Tensor, layer: int, tables: Tensor, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V in `dtype` of the sequences in `tables` [batch, blocks], each [batch, kv_heads, num_tokens, head_dim]."""
    kv_heads, block_size, slot_size = pool.shape[1], pool.shape[4], pool.shape[5]
    tables = tables[:, : -(-num_tokens // block_size)]
    batch, num_blocks = tables.shape
    rows = _first_rows(pool, layer, tables[:, None]).flatten()  # [batch * kv_heads * blocks]
    halves = pool.view(-1, block_size * slot_size)
    halves = halves.view(torch.int8) if pool.dtype in LARGEST else halves  # not every torch selects fp8 on a GPU
    shape = (batch, kv_heads, num_blocks * block_size, slot_size)

    def vectors(rows: Tensor) -> Tensor:
        slots = halves.index_select(0, rows).view(pool.dtype).view(shape)
        return from_slots(slots[:, :, :num_tokens], dtype)

    key = vectors(rows)
    return key, key if pool.shape[3] == 1 else vectors(rows + 1)


def _first_rows(pool: Tensor, layer: int, blocks: Tensor) -> Tensor:
    """Row of (block, kv_head, layer, K) in the pool viewed as [block * kv_head * layer * k|v, ...].

    `blocks` must broadcast against the KV heads: [batch, 1, blocks] gives [batch, kv_heads, blocks] and [tokens, 1]
    gives [tokens, kv_heads].
    """
    _, kv_heads, layers, vectors = pool.shape[:4]
    head = torch.arange(kv_heads, device=pool.device)
    if blocks.dim() == 3:
        head = head[:, None]
    return ((blocks * kv_heads + head) * layers + layer) * vectors


def attend_span(query: Tensor, pool: Tensor, layer: int, span: KeySpan, scoring: Scoring) -> Tensor:
    """See `attention.AttendSpan`; the queries may also be among the keys."""
    table, num_keys, position, state = span.table, span.num_keys, span.position, span.state
    tokens, heads, head_dim = query.shape
    block_size, kv_heads = pool.shape[4], pool.shape[1]
    folded = (tokens, kv_heads, heads // kv_heads, -1)
    queries = query.float().reshape(folded)  # [tokens, kv_heads, group, head_dim]
    if state is None:
        state = query.new_zeros(tokens, heads, head_dim + 2, dtype=torch.float32)
        state[..., 0] = -torch.inf
    most, total, values = state[..., 0], state[..., 1], state[..., 2:]
    query_at = torch.arange(position, position + tokens, device=query.device)[:, None]
    step = max(1, KEYS // block_size)  # blocks
    for first in range(0, -(-num_keys // block_size), step):
        key_at = torch.arange(first * block_size, min(num_keys, (first + step) * block_size), device=query.device)
        key, value = (each[0] for each in gather(pool, layer, table[None, first:], len(key_at), torch.float32))
        scores = torch.einsum("qhgd,hkd->qhgk", queries, key).flatten(1, 2) * scoring.scale  # [tokens, heads, keys]
        scores = scoring.capped(scores)
        hidden = key_at > query_at
        if scoring.window:
            hidden |= key_at < first_key(query_at + span.begin, scoring.window) - span.begin
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        greater = torch.maximum(most, scores.amax(-1))
        base = greater.masked_fill(greater == -torch.inf, 0.0)  # a row that sees no key so far
        weights, kept = torch.exp(scores - base[..., None]), torch.exp(most - base)
        weighted = torch.einsum("qhgk,hkd->qhgd", weights.view(folded), value).flatten(1, 2)
        most, total, values = greater, total * kept + weights.sum(-1), values * kept[..., None] + weighted
    return torch.cat([most[..., None], total[..., None], values], -1)


def of_sinks(sinks: Tensor, like: Tensor) -> Tensor:
    """The state after the one key of each head's sink [heads], for as many queries as `like`."""
    state = torch.zeros_like(like)
    state[..., 0], state[..., 1] = sinks, 1.0
    return state


def join(earlier: Tensor, later: Tensor) -> Tensor:
    """The state after the keys of both. Each row has a key in `later`."""
    most = torch.maximum(earlier[..., :1], later[..., :1])
    kept, taken = torch.exp(earlier[..., :1] - most), torch.exp(later[..., :1] - most)
    return torch.cat([most, earlier[..., 1:] * kept + later[..., 1:] * taken], -1)
