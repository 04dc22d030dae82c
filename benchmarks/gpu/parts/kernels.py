"""Attention kernels alone: decode as a share of memory bandwidth, prompts as a share of a matrix product's FLOP/s.

The peer is torch's own attention over the same K and V without paging.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.llama import LLAMA_8B, TINY, LlamaShape
from benchmarks.gpu.timing import copy_bytes_s, graph_seconds_of, matmul_flop_s
from workers.ops import triton_paged
from workers.ops.batch import RaggedBatch, Scoring

SIZE = 16
LAYERS = 4  # of a decode's pool, so that keys of one call are not in the cache for the next
DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (4, 32768))  # sequences, keys of each
PROMPTS = (2048, 8192)


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    shape = TINY if tiny else LLAMA_8B
    copy = copy_bytes_s(device, 1 << (16 if tiny else 32))
    flops = matmul_flop_s(device, 64 if tiny else 8192)
    figures: dict[str, object] = {"copy_gb_s": copy / 1e9, "matmul_tflop_s": flops / 1e12}
    for rows, context in ((2, 40),) if tiny else DECODES:
        seconds, peer_s = _decode(shape, rows, context, device)
        num_bytes = 2 * 2 * rows * context * shape.kv_heads * shape.head_dim
        figures[f"decode_{rows}x{context}_us"] = seconds * 1e6
        figures[f"decode_{rows}x{context}_share_of_copy"] = num_bytes / seconds / copy
        figures[f"decode_{rows}x{context}_time_of_torch_sdpa"] = seconds / peer_s
    for length in (40,) if tiny else PROMPTS:
        seconds, invariant_s, peer_s = _prompt(shape, length, device)
        work = 2 * length * length * shape.heads * shape.head_dim  # half of 4: causal
        figures[f"prompt_{length}_us"] = seconds * 1e6
        figures[f"prompt_{length}_share_of_matmul"] = work / seconds / flops
        figures[f"prompt_{length}_time_of_torch_sdpa"] = seconds / peer_s
        figures[f"prompt_{length}_invariant_time"] = invariant_s / seconds
    return figures


def _decode(shape: LlamaShape, rows: int, context: int, device: torch.device) -> tuple[float, float]:
    """Seconds of our kernels, and of torch's."""
    query, pool, batch = _inputs(shape, LAYERS, [1] * rows, context, device)
    layers = itertools.cycle(range(LAYERS))
    seconds = graph_seconds_of(lambda: triton_paged.attend(query, pool, next(layers), batch, Scoring(0.1)), device)
    keys, values = torch.randn(2, rows, shape.kv_heads, context, shape.head_dim, device=device).to(query.dtype)
    queries = query.view(rows, shape.heads, 1, shape.head_dim)
    peer_s = graph_seconds_of(lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True), device)
    return seconds, peer_s


def _prompt(shape: LlamaShape, length: int, device: torch.device) -> tuple[float, float, float]:
    """Seconds of our kernel, of its invariant variant, and of torch's."""
    query, pool, batch = _inputs(shape, 1, [length], length, device)

    def attend(*, invariant: bool) -> Tensor:
        return triton_paged.attend(query, pool, 0, batch, Scoring(0.1), invariant=invariant)

    seconds = graph_seconds_of(lambda: attend(invariant=False), device)
    invariant_s = graph_seconds_of(lambda: attend(invariant=True), device)
    keys, values = torch.randn(2, 1, shape.kv_heads, length, shape.head_dim, device=device).to(query.dtype)
    queries = query.transpose(0, 1)[None].contiguous()
    peer_s = graph_seconds_of(
        lambda: F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True), device
    )
    return seconds, invariant_s, peer_s


def _inputs(
    shape: LlamaShape, layers: int, lengths: list[int], context: int, device: torch.device
) -> tuple[Tensor, Tensor, RaggedBatch]:
    """Queries of sequences with `context` keys each, in shuffled blocks."""
    dtype = torch.bfloat16
    blocks = -(-context // SIZE)
    pool = torch.empty(
        len(lengths) * blocks, shape.kv_heads, layers, 2, SIZE, shape.head_dim, dtype=dtype, device=device
    )
    tables = torch.randperm(len(lengths) * blocks, device=device).int().view(len(lengths), blocks)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    contexts = torch.full((len(lengths),), context, dtype=torch.int32, device=device)
    slots = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
    query = torch.randn(sum(lengths), shape.heads, shape.head_dim, device=device).to(dtype)
    num_decodes = len(lengths) if max(lengths) == 1 else 0
    return query, pool.normal_(), RaggedBatch(starts, contexts, tables, slots, max(lengths), context, num_decodes)
