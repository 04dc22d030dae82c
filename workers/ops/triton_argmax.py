"""The likeliest token of each row, and whether all its logits are finite, in one pass over the logits.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # tokens of a program


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [rows, vocab]: the first of the largest, int64 [rows], and whether the row is finite, bool [rows]."""
    logits = logits.contiguous()
    rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, TILE)
    largest = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _of_tile[(rows, tiles)](logits, largest, tokens, vocab_size, TILE=TILE)
    _of_row[(rows,)](largest, tokens, token, finite, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1)
    return token, finite


@triton.jit  # type: ignore[untyped-decorator]
def _of_tile(logits, largest, tokens, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tile * TILE + tl.arange(0, TILE)
    score = tl.load(logits + row * vocab_size + at, at < vocab_size, float("-inf")).to(tl.float32)
    inside = at < vocab_size
    # Infinity stands for a tile with any number that is not finite; x - x is then NaN.
    broken = tl.max(tl.where(inside & ((score - score) != 0.0), 1, 0), 0)
    best = tl.max(score, 0)
    token = tl.min(tl.where(inside & (score == best), at, vocab_size), 0)
    tl.store(largest + row * tiles + tile, tl.where(broken != 0, float("inf"), best))
    tl.store(tokens + row * tiles + tile, token)


@triton.jit  # type: ignore[untyped-decorator]
def _of_row(largest, tokens, token, finite, tiles, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    inside = at < tiles
    score = tl.load(largest + row * tiles + at, inside, float("-inf"))
    best = tl.max(score, 0)
    # Tiles come in the order of their tokens, so the least token of the best is in the first of them.
    first = tl.min(tl.where(inside & (score == best), tl.load(tokens + row * tiles + at, inside, 0), 2147483647), 0)
    tl.store(token + row, first.to(tl.int64))
    tl.store(finite + row, best < float("inf"))
