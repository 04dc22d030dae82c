"""The floors of top-k, top-p and min-p for whole rows as one Triton kernel, without a sort.

A floor of top-k or top-p is the score of the last token that stays: the largest score from which on there are k tokens,
or the wanted mass. Floating-point numbers have the order of integers, so bisection finds it exactly, in at most 32
passes over a row, 16 if the scores are bfloat16. One program takes one row, which the second-level cache holds.

The weights differ from numpy's by rounding. So there are two bounds: from `sure` on a token passes numpy's filters for
certain, and below `lowest` it does not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDING = tl.constexpr(1e-6)  # of a weight; more than float32 exponentials of two libraries differ
MASS_ROUNDING = tl.constexpr(1e-5)  # of the mass of a row's likeliest tokens
TILE = 16384  # tokens at most
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of a score as float32


def filter_bounds(scores: Tensor, largest: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
    """`lowest` and `sure` [2, rows] float64, for scores [rows, vocab].

    largest [rows, tiles]: see `TileSummary`; keys: see `choose`; filters [3, rows] float64: top_k (vocab: off), top_p
    (1: off) and min_p (0: off).
    """
    rows, vocab_size = scores.shape
    tiles = largest.shape[1]
    bounds = torch.empty(2, rows, dtype=torch.float64, device=scores.device)
    sizes = {"TILE": min(TILE, triton.next_power_of_2(vocab_size)), "TILES": triton.next_power_of_2(tiles)}
    arguments = (scores, scores.stride(0), largest, tiles, keys, filters, bounds, vocab_size)
    _bound[(rows,)](*arguments, **sizes, UNUSED=_UNUSED_BITS[scores.dtype], num_warps=32)
    return bounds


@triton.jit  # type: ignore[untyped-decorator]
def _key(score, UNUSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """An integer in the order of the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNUSED).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _score(key, UNUSED: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = (key << UNUSED).to(tl.int32)
    bits = tl.where(bits < 0, (bits | ((1 << UNUSED) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _number_from(floor, scores, vocab_size, most, temperature, WEIGHED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens have at least the score `floor`, or what they weigh; in float64."""
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        at = first + tl.arange(0, TILE)
        score = tl.load(scores + at, at < vocab_size, float("-inf")).to(tl.float32)
        number = tl.exp((score - most) / temperature) if WEIGHED else tl.full([TILE], 1.0, tl.float32)
        total += tl.where((at < vocab_size) & (score >= floor), number, 0.0)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _floor(  # type: ignore[no-untyped-def]
    low, high, wanted, scores, vocab_size, most, temperature, WEIGHED: tl.constexpr, TILE: tl.constexpr,
    UNUSED: tl.constexpr,
):  # fmt: skip
    """The last key from `low` on and before `high` that reaches `wanted`; `low` counts as one that does."""
    while high - low > 1:
        middle = (low + high) >> 1
        reached = _number_from(_score(middle, UNUSED), scores, vocab_size, most, temperature, WEIGHED, TILE) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _bound(  # type: ignore[no-untyped-def]
    scores,
    row_stride,
    largest,
    tiles,
    keys,
    filters,
    bounds,
    vocab_size,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    UNUSED: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    scores += row * row_stride
    temperature = tl.load(keys + row).to(tl.float64, bitcast=True).to(tl.float32)
    top_k, top_p, min_p = tl.load(filters + row), tl.load(filters + rows + row), tl.load(filters + 2 * rows + row)
    lowest = tl.full([], float("-inf"), tl.float64)
    sure = lowest
    if temperature > 0.0:
        of_tile = tl.arange(0, TILES)
        most = tl.max(tl.load(largest + row * tiles + of_tile, of_tile < tiles, float("-inf")), 0)
        exact_most, exact_temperature = most.to(tl.float64), temperature.to(tl.float64)
        least = tl.full([], float("-inf"), tl.float32)
        first, end = _key(least, UNUSED), _key(most, UNUSED) + 1
        last = first
        if top_k < vocab_size:
            last = _floor(first, end, top_k, scores, vocab_size, most, temperature, False, TILE, UNUSED)
        likely = last
        if top_p < 1.0:
            floor = _score(last, UNUSED)
            mass = _number_from(floor, scores, vocab_size, most, temperature, True, TILE)
            if top_k < vocab_size:  # of the tokens that tie at the floor, only some are among the k
                number = _number_from(floor, scores, vocab_size, most, temperature, False, TILE)
                mass -= (number - top_k) * tl.exp((floor - most) / temperature).to(tl.float64)
            wanted = top_p * mass
            more, less = wanted * (1.0 + MASS_ROUNDING), wanted * (1.0 - MASS_ROUNDING)
            likely = _floor(last, end, less, scores, vocab_size, most, temperature, True, TILE, UNUSED)
            reached = _number_from(_score(likely, UNUSED), scores, vocab_size, most, temperature, True, TILE)
            if reached >= more:
                last = likely
            else:
                last = _floor(last, likely, more, scores, vocab_size, most, temperature, True, TILE, UNUSED)
        lowest, sure = _score(last, UNUSED).to(tl.float64), _score(likely, UNUSED).to(tl.float64)
        lowest -= ROUNDING * (exact_temperature + tl.abs(lowest - exact_most))
        if min_p > 0.0:
            floor_of_min_p = exact_most + exact_temperature * tl.log(min_p)
            margin = ROUNDING * (exact_temperature + tl.abs(floor_of_min_p - exact_most))
            lowest = tl.maximum(lowest, floor_of_min_p - margin)
            sure = tl.maximum(sure, tl.minimum(floor_of_min_p + margin, exact_most))
    tl.store(bounds + row, lowest)
    tl.store(bounds + rows + row, sure)
