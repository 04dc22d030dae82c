"""Paged attention as simple code: one sequence at a time, one formula. Defines the result of all backends."""

import torch
from torch import Tensor

from workers.ops.batch import RaggedBatch, Scoring, first_key
from workers.ops.narrow import from_slots, to_slots


def write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """See `attention.Attention`."""
    block_size = pool.shape[4]
    for token, slot in enumerate(slot_mapping.tolist()):
        for index, vectors in enumerate((key, value)[: pool.shape[3]]):
            pool[slot // block_size, :, layer, index, slot % block_size] = to_slots(vectors[token], pool.dtype)


def attend(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
    """See `attention.Attend`."""
    outputs = []
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    group = query.shape[1] // pool.shape[1]
    for row, context in enumerate(contexts):
        chunk = query[starts[row] : starts[row + 1]]  # [queries, heads, head_dim]
        slots = pool[batch.block_tables[row].long(), :, layer]  # [blocks, kv_heads, k|v, slot, slot_size]
        blocks = from_slots(slots, query.dtype)
        vectors = blocks.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :context].repeat_interleave(group, dim=2)
        keys, values = vectors[0], vectors[-1]
        scores = torch.einsum("qhd,khd->hqk", chunk, keys) * scoring.scale  # [heads, queries, context]
        scores = scoring.capped(scores)
        query_at = torch.arange(context - len(chunk), context, device=query.device)[:, None]
        key_at = torch.arange(context, device=query.device)[None, :]
        hidden = key_at > query_at
        if scoring.window:
            hidden |= key_at < first_key(query_at, scoring.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks[:, None, None].expand(-1, len(chunk), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :context]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)
