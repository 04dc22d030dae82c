"""Linear layers on a GPU whose rows have the same bits in any batch, as Triton kernels.

    few rows     a program for each tile of y and span of x's columns; a second kernel adds the spans
    many rows    one program for all spans of a tile

Both multiply in the same order with the same instruction: 64 rows, padded with zeros, by `columns` of y, over `depth`
of x. Products are summed in float32, each span from zero, then the spans from left to right. How many spans there are
depends on the weight's shape alone. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 128  # at most, for the first kernel
PROGRAMS = 128  # of the first kernel for up to 64 rows, at least: an H100 or H200 has 132 multiprocessors
MIN_SPAN = 256
MAX_SPANS = 8
_GROUP = 16  # tiles of rows that run side by side and so read the same weights
_ADDED = 1024  # numbers of a program that adds spans


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the kernels for numbers of one size. `few` and `many`: rows, warps and stages of a program."""

    columns: int
    depth: int
    few: tuple[int, int, int]
    many: tuple[int, int, int]


HALF = Tiles(columns=128, depth=64, few=(64, 4, 4), many=(128, 8, 3))
SINGLE = Tiles(columns=64, depth=32, few=(32, 4, 3), many=(64, 8, 3))  # without tensor cores


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x Wᵀ + b for x [rows, in], W [out, in] and b [out] of one dtype: float32, float16 or bfloat16."""
    rows, (out, size) = x.shape[0], weight.shape
    x, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (x, weight))
    y = x.new_empty(rows, out)
    if not rows:
        return y
    tiles = SINGLE if x.dtype == torch.float32 else HALF
    span = span_of(out, size, tiles)
    spans = triton.cdiv(size, span)
    split = spans > 1 and rows <= FEW_ROWS
    height, warps, stages = tiles.few if rows <= FEW_ROWS else tiles.many
    target = x.new_empty(spans, rows, out, dtype=torch.float32) if split else y
    _multiply[(triton.cdiv(rows, height) * triton.cdiv(out, tiles.columns), spans if split else 1)](
        x, x.stride(0), weight, weight.stride(0), None if split else bias, target, rows, out, size, span,
        SPLIT=split, EVEN=size % tiles.depth == 0, BIASED=bias is not None and not split,
        ROWS=height, COLUMNS=tiles.columns, DEPTH=tiles.depth, GROUP=_GROUP, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if split:
        _add[(triton.cdiv(out, _ADDED), rows)](target, bias, y, out, spans, BIASED=bias is not None, COLUMNS=_ADDED)
    return y


def span_of(out: int, size: int, tiles: Tiles) -> int:
    """Columns of x in a span: as many spans as fill the device for a single tile of rows."""
    spans, columns = 1, triton.cdiv(out, tiles.columns)
    while spans < MAX_SPANS and spans * columns < PROGRAMS and size >= 2 * spans * MIN_SPAN:
        spans *= 2
    return int(triton.cdiv(triton.cdiv(size, spans), tiles.depth) * tiles.depth)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x, x_stride, weight, weight_stride, bias, y, rows, out, size, span,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of y; SPLIT: one span of it, into y [spans, rows, out]."""
    group = GROUP * tl.cdiv(out, COLUMNS)
    first = tl.program_id(0) // group * GROUP
    height = tl.minimum(tl.cdiv(rows, ROWS) - first, GROUP)
    row = (first + tl.program_id(0) % group % height) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % group // height * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    real, known = row < rows, column < out
    x += row.to(tl.int64)[:, None] * x_stride + at[None, :]
    weight += column.to(tl.int64)[None, :] * weight_stride + at[:, None]
    begin, end = 0, size
    if SPLIT:
        begin = tl.program_id(1) * span
        end = tl.minimum(begin + span, size)
        y += tl.program_id(1).to(tl.int64) * rows * out
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, span):
        summed = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tile in range(start, tl.minimum(start + span, size), DEPTH):
            if EVEN:
                left = tl.load(x + tile, real[:, None], 0.0)
                right = tl.load(weight + tile, known[None, :], 0.0)
            else:
                inside = tile + at < size
                left = tl.load(x + tile, real[:, None] & inside[None, :], 0.0)
                right = tl.load(weight + tile, known[None, :] & inside[:, None], 0.0)
            summed = tl.dot(left, right, summed, input_precision="ieee")
        total += summed
    if BIASED:
        total += tl.load(bias + column, known, 0.0).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(to, total.to(y.dtype.element_ty), real[:, None] & known[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _add(parts, bias, y, out, spans, BIASED: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of y from its spans, parts [spans, rows, out], added as `_multiply` adds them."""
    column, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1).to(tl.int64)
    known, rows = column < out, tl.num_programs(1)
    parts += row * out + column
    total = tl.zeros([COLUMNS], tl.float32)
    for _ in range(spans):
        total += tl.load(parts, known, 0.0)
        parts += rows * out
    if BIASED:
        total += tl.load(bias + column, known, 0.0).to(tl.float32)
    tl.store(y + row * out + column, total.to(y.dtype.element_ty), known)
