"""Low-rank changes of linear layers on a GPU, y += (x A) B, each row with its own A and B or none, as Triton kernels.

    tiles of up to 16 rows with the same adapter     inner = x A in float32, 16 ranks a program; then y += inner B

Adapters are reached by their addresses, in the entries of `workers.ops.lora`. A tile is always padded to 16 rows, and
nothing else depends on the batch, so the bits of a row depend on no other row. Runs on a GPU, or in Triton's
interpreter (TRITON_INTERPRET=1). Source: Chen et al., Punica (2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile, and ranks of a program: the least that tensor cores multiply
FIELDS = 5  # of an entry: the addresses of A and B, the first column of y, the number of columns, the rank
_COLUMNS, _DEPTH = 64, 64


def add(x: Tensor, y: Tensor, rows: Tensor, tiles: Tensor, entries: Tensor, most: tuple[int, int]) -> None:
    """x [rows, in] and y [rows, out] of one dtype; `rows` [n] int32: those with an adapter, sorted by it.

    tiles [tiles, 3] int32: an adapter, the place of the tile's first row in `rows`, and its number of rows. entries
    [adapters, parts, FIELDS] int64; rank 0: no such part. `most`: the largest rank and number of columns of them.
    """
    places, chunks = (len(tiles), entries.shape[1]), triton.cdiv(most[0], ROWS)
    inner = x.new_empty(*places, ROWS, chunks * ROWS, dtype=torch.float32)
    sizes = {"HEIGHT": ROWS, "STRIDE": FIELDS}
    _shrink[(*places, chunks)](
        x, x.stride(0), x.shape[1], rows, tiles, entries, inner, chunks * ROWS, DEPTH=_DEPTH, **sizes
    )
    _expand[(*places, triton.cdiv(most[1], _COLUMNS))](
        y, y.stride(0), rows, tiles, entries, inner, chunks * ROWS, COLUMNS=_COLUMNS, **sizes
    )


@triton.jit  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, x_stride, size, rows, tiles, entries, inner, inner_stride,
    HEIGHT: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry = entries + (tl.load(tiles + 3 * tile) * parts + part) * STRIDE
    width = (tl.load(entry + 4).to(tl.int32) + 15) // 16 * 16
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    place, at = tl.arange(0, HEIGHT), tl.arange(0, DEPTH)
    column = tl.program_id(2) * HEIGHT + tl.arange(0, HEIGHT)
    real = place < tl.load(tiles + 3 * tile + 2)
    row = tl.load(rows + tl.load(tiles + 3 * tile + 1) + place, real, 0).to(tl.int64)
    total = tl.zeros([HEIGHT, HEIGHT], tl.float32)
    for start in range(0, size, DEPTH):
        depth = start + at
        left = tl.load(x + row[:, None] * x_stride + depth[None, :], real[:, None] & (depth < size)[None, :], 0.0)
        known = (depth < size)[:, None] & (column < width)[None, :]
        right = tl.load(a + depth[:, None] * width + column[None, :], known, 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(inner + ((tile * parts + part) * HEIGHT + place)[:, None] * inner_stride + column[None, :], total)


@triton.jit  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    y, y_stride, rows, tiles, entries, inner, inner_stride,
    HEIGHT: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry = entries + (tl.load(tiles + 3 * tile) * parts + part) * STRIDE
    first, out, rank = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    b = tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, HEIGHT)
    real = place < tl.load(tiles + 3 * tile + 2)
    row = tl.load(rows + tl.load(tiles + 3 * tile + 1) + place, real, 0).to(tl.int64)
    total = tl.zeros([HEIGHT, COLUMNS], tl.float32)
    for start in range(0, rank, HEIGHT):
        at = start + tl.arange(0, HEIGHT)
        left = tl.load(inner + ((tile * parts + part) * HEIGHT + place)[:, None] * inner_stride + at[None, :])
        known = (at < rank)[:, None] & (column < out)[None, :]
        right = tl.load(b + at[:, None] * out + column[None, :], known, 0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
    to, inside = y + row[:, None] * y_stride + first + column[None, :], real[:, None] & (column < out)[None, :]
    tl.store(to, tl.load(to, inside, 0.0) + total.to(y.dtype.element_ty), inside)
