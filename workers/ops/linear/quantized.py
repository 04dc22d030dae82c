"""Linear layers with rounded weights: bfloat16, int8 rows, or the blocks of GGUF files.

Each call quantizes x to 8 bits too: GGUF formats with one scale per 32 numbers of a row, as llama.cpp does; int8 with
one scale per row; bfloat16 keeps x. Without native kernels the rounded weights become float32 once, and x stays.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.ops.linear.blocks import dequantize
from workers.ops.linear.dense import Linear
from workers.ops.linear.panels import Panels
from workers.ops.native.library import library

INT8_COLUMNS = 65536  # sums of more byte products would overflow 32 bits


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """y = x Wᵀ + b by `compute`, with W in `weight_format`."""

    weight_format: str
    compute: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.compute(x)


def bfloat16_linear(weight: Tensor, bias: Tensor | None, deterministic: bool) -> PackedLinear:
    """All sums are in float32. On a CPU with AMX, calls with 16 rows or more split x into the sum of two bfloat16,
    which keeps 16 of its 24 bits; not if `deterministic`.
    """
    if library() is None:
        return PackedLinear("bfloat16", Linear(weight.bfloat16().float(), bias, deterministic))
    method = "bfloat16" if deterministic else "bfloat16_tiled"
    return PackedLinear("bfloat16", Panels(weight, weight.shape[1], bias, "bfloat16", method))


def int8_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """One scale per row. Deterministic."""
    columns = weight.shape[1]
    if columns > INT8_COLUMNS:
        raise ValueError(f"int8 weights have at most {INT8_COLUMNS} columns, these have {columns}; take q8_0")
    numbers, scales = rounded_rows(weight)
    if library() is None:
        return PackedLinear("int8", Linear(numbers * scales, bias, deterministic=True))
    rows = torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=1)  # [out, 4 + columns]
    return PackedLinear("int8", Panels(rows, columns, bias, "int8"))


def block_linear(blocks: Tensor, columns: int, bias: Tensor | None, weight_format: str) -> PackedLinear:
    """For GGUF blocks [out, bytes] of a weight with `columns` columns. Deterministic."""
    if library() is None:
        weight = dequantize(blocks, weight_format)[:, :columns]
        return PackedLinear(weight_format, Linear(weight, bias, deterministic=True))
    return PackedLinear(weight_format, Panels(blocks, columns, bias, weight_format))


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] as int8 numbers [out, in] and scales [out, 1]; the largest of each row becomes 127."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = torch.where(scales > 0, weight / scales, 0).round().to(torch.int8)
    return numbers, scales
