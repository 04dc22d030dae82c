"""Attention in parts with torch, for backends that attend to whole sequences only: fold keys into a state.

See `workers.ops.batch` for states. Right within rounding, not bit for bit.
"""

import torch
from torch import Tensor

from workers.ops.batch import KeySpan, Scoring, first_key
from workers.ops.sdpa import gather

KEYS = 1024  # at a time: bounds the memory for scores


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
