"""Greedy tokens and Gumbel-max of whole rows as three Triton kernels; see `workers.executor.gumbel_max` for it.

    summarize    of each tile of a row: its largest score, and the first token that has it; reads all scores
    _sample      of each tile: the token with the best value, and the two largest values, in float64; reads them again
    _decide      of each row: the token, whether the row is finite, and whether the token is certain

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1). As in the native kernel, a row's result counts only if
it leads by more than the rounding differences between math libraries.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

CLEAR = tl.constexpr(1.0 - 1e-5)  # the second-best value must be below this part of the best
MIN_TILE, TILE = 16, 1024  # tokens


@dataclass(frozen=True, slots=True)
class TileSummary:
    """`tokens` are -1 in tiles with NaN or infinity."""

    largest: Tensor  # [rows, tiles] float32
    tokens: Tensor  # [rows, tiles] int32


def summarize(scores: Tensor) -> TileSummary:
    """Of scores [rows, vocab], of any floating-point type, with dense rows."""
    rows, vocab_size = scores.shape
    tile = _tile(vocab_size)
    tiles = triton.cdiv(vocab_size, tile)
    largest = torch.empty(rows, tiles, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int32, device=scores.device)
    _summarize[(rows, tiles)](scores, scores.stride(0), largest, tokens, vocab_size, TILE=tile)
    return TileSummary(largest, tokens)


def choose(
    scores: Tensor, summary: TileSummary, keys: Tensor, bounds: Tensor | None = None, *, greedy: bool = False
) -> Tensor:
    """Three rows [3, rows] int64: each row's token, whether its scores are finite, and whether the token is certain.

    keys [3, rows] int64: the bits of each row's temperature (float64, 0: greedy), seed and position (unsigned). bounds
    [2, rows] float64: tokens with a score below the first are filtered; a token below the second is not certain.
    `greedy`: all rows are.
    """
    rows, vocab_size = scores.shape
    tiles = summary.tokens.shape[1]
    chosen = torch.empty(3, rows, dtype=torch.int64, device=scores.device)
    values = torch.empty(2, rows, tiles, dtype=torch.float64, device=scores.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int32, device=scores.device)
    sizes = {"TILE": _tile(vocab_size), "TILES": triton.next_power_of_2(tiles), "FILTERED": bounds is not None}
    arguments = (scores, scores.stride(0), summary.largest, summary.tokens, keys, bounds, values, tokens, chosen)
    if not greedy:
        _sample[(rows, tiles)](*arguments, vocab_size, **sizes)
    _decide[(rows,)](*arguments, tiles, **sizes)
    return chosen


def _tile(vocab_size: int) -> int:
    size: int = min(TILE, triton.next_power_of_2(vocab_size))
    return max(MIN_TILE, size)


@triton.jit  # type: ignore[untyped-decorator]
def _summarize(scores, row_stride, largest, tokens, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < vocab_size
    score = tl.load(scores + row * row_stride + at, inside, 0.0).to(tl.float32)
    finite = tl.min((score - score == 0.0).to(tl.int32), 0)
    score = tl.where(inside, score, float("-inf"))
    most = tl.max(score, 0)
    token = tl.min(tl.where(score == most, at, vocab_size - 1), 0)
    tl.store(largest + row * tiles + tile, most)
    tl.store(tokens + row * tiles + tile, tl.where(finite == 1, token, -1))


@triton.jit  # type: ignore[untyped-decorator]
def _sample(  # type: ignore[no-untyped-def]
    scores,
    row_stride,
    largest,
    likeliest,
    keys,
    bounds,
    values,
    tokens,
    chosen,
    vocab_size,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    rows = tl.num_programs(0)
    temperature = tl.load(keys + row).to(tl.float64, bitcast=True).to(tl.float32)
    if temperature > 0.0:
        seed = tl.load(keys + rows + row).to(tl.uint64, bitcast=True)
        position = tl.load(keys + 2 * rows + row).to(tl.uint64, bitcast=True)
        # Four words for each counter; numpy counts before it draws.
        counter = (tile * (TILE // 4) + tl.arange(0, TILE // 4) + 1).to(tl.uint64)
        zero = counter - counter
        a, b, c, d = philox_impl(counter, zero, zero, zero, seed, position, 10)
        number = (tl.interleave(tl.interleave(a, c), tl.interleave(b, d)) >> 11).to(tl.int64)  # u in units of 2^-53
        # 1 - u is exact in float64, so this is log1p(-u); u = 0 counts as 2^-54.
        time = -tl.log((9007199254740992 - number).to(tl.float64) * 1.1102230246251565e-16)
        time = tl.where(number == 0, 5.551115123125783e-17, time)

        of_tile = tl.arange(0, TILES)
        most = tl.max(tl.load(largest + row * tiles + of_tile, of_tile < tiles, float("-inf")), 0)
        at = tile * TILE + tl.arange(0, TILE)
        inside = at < vocab_size
        score = tl.load(scores + row * row_stride + at, inside, float("-inf")).to(tl.float32)
        power = tl.div_rn(score - most, temperature)
        power = tl.where(power <= 0.0, power, float("-inf"))  # not NaN
        value = tl.exp(power.to(tl.float64)) / time
        if FILTERED:
            value = tl.where(score.to(tl.float64) >= tl.load(bounds + row), value, 0.0)

        best = tl.max(value, 0)
        token = tl.min(tl.where(value == best, at, vocab_size - 1), 0)
        second = tl.max(tl.where(at == token, 0.0, value), 0)
        tl.store(values + row * tiles + tile, best)
        tl.store(values + (rows + row) * tiles + tile, second)
        tl.store(tokens + row * tiles + tile, token)


@triton.jit  # type: ignore[untyped-decorator]
def _decide(  # type: ignore[no-untyped-def]
    scores,
    row_stride,
    largest,
    likeliest,
    keys,
    bounds,
    values,
    tokens,
    chosen,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    tile = tl.arange(0, TILES)
    at, inside = row * tiles + tile, tile < tiles
    each_largest = tl.load(largest + at, inside, float("-inf"))
    each_likeliest = tl.load(likeliest + at, inside, 0)
    most = tl.max(each_largest, 0)
    finite = tl.min(each_likeliest, 0) >= 0
    temperature = tl.load(keys + row).to(tl.float64, bitcast=True)
    if temperature > 0.0:
        each_best = tl.load(values + at, inside, 0.0)
        each_second = tl.load(values + rows * tiles + at, inside, 0.0)
        best = tl.max(each_best, 0)
        winner = tl.min(tl.where(each_best == best, tile, tiles - 1), 0)
        second = tl.maximum(tl.max(tl.where(tile == winner, 0.0, each_best), 0), tl.max(each_second, 0))
        token = tl.load(tokens + row * tiles + winner)
        # Scores of nothing but the least number: all tokens are banned.
        certain = (second < best * CLEAR) & (most > -3.0e38)
        if FILTERED:
            score = tl.load(scores + row * row_stride + token).to(tl.float64)
            certain = certain & (score >= tl.load(bounds + rows + row))
    else:
        token = tl.min(tl.where(each_largest == most, each_likeliest, 2147483647), 0)
        certain = finite
    token = tl.where(finite, token, 0)
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(chosen + rows + row, finite.to(tl.int64))
    tl.store(chosen + 2 * rows + row, certain.to(tl.int64))
