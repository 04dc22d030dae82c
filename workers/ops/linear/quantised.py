"""Linear layers with quantised weights: int8 rows, or the blocks of GGUF files.

Each call quantises x to 8 bits too: GGUF formats with one scale per 32 numbers of a row, as llama.cpp does; int8 with
one scale per row. Without native kernels the weights are dequantised to float32 once and x stays as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.ops.linear.blocks import dequantise
from workers.ops.linear.dense import Linear
from workers.ops.linear.panels import Panels
from workers.ops.native.library import library

INT8_COLUMNS = 65536  # sums of more byte products would overflow 32 bits


class BlockLinear:
    """y = x Wᵀ + b for GGUF blocks [out, bytes] of a weight with `columns` columns. Deterministic."""

    def __init__(self, blocks: Tensor, columns: int, bias: Tensor | None, weight_format: str) -> None:
        self.weight_format = weight_format
        self._compute: Callable[[Tensor], Tensor]
        if library() is not None:
            self._compute = Panels(blocks, columns, bias, weight_format)
        else:
            self._compute = Linear(dequantise(blocks, weight_format)[:, :columns], bias, deterministic=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x)


class Int8Linear:
    """y = x Wᵀ + b with W rounded to 8 bits, one scale per row. Deterministic."""

    weight_format = "int8"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        columns = weight.shape[1]
        if columns > INT8_COLUMNS:
            raise ValueError(f"int8 weights have at most {INT8_COLUMNS} columns, these have {columns}; take q8_0")
        numbers, scales = rounded_rows(weight)
        self._compute: Callable[[Tensor], Tensor]
        if library() is not None:
            rows = torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=1)  # [out, 4 + columns]
            self._compute = Panels(rows, columns, bias, "int8")
        else:
            self._compute = Linear(numbers * scales, bias, deterministic=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x)


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] as int8 numbers [out, in] and scales [out, 1]; the largest of each row becomes 127."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = torch.where(scales > 0, weight / scales, 0).round().to(torch.int8)
    return numbers, scales
