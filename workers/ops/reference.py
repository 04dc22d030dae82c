"""Paged attention written for the eye: one sequence at a time, one formula, no trick. The truth in tests."""

from collections.abc import Sequence

import torch
from torch import Tensor


def write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """See `attention.WriteKV`."""
    block_size = pool.shape[4]
    for token, slot in enumerate(slot_mapping.tolist()):
        pool[slot // block_size, :, layer, 0, slot % block_size] = key[token].to(pool.dtype)
        pool[slot // block_size, :, layer, 1, slot % block_size] = value[token].to(pool.dtype)


def attend(
    query: Tensor,
    pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """See `attention.Attend`."""
    outputs = []
    for row, chunk in enumerate(torch.split(query, list(query_lens))):  # chunk: [queries, heads, head_dim]
        context, group = context_lens[row], query.shape[1] // pool.shape[1]
        blocks = pool[block_tables[row], :, layer].to(query.dtype)  # [blocks, kv_heads, k|v, slot, head_dim]
        keys, values = blocks.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :context].repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", chunk, keys) * scale  # [heads, queries, context]
        query_at = torch.arange(context - len(chunk), context, device=query.device)[:, None]
        key_at = torch.arange(context, device=query.device)[None, :]
        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)
