"""Linear layers whose weights stay quantised: int8 rows, or the blocks of GGUF files.

x is rounded to 8 bits as well, on the fly: with one scale for every 32 numbers of a row, as llama.cpp does (int8: with
one for the row). Without native kernels the same weights, made float32 once, meet x as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.ops.linear.blocks import dequantise
from workers.ops.linear.dense import Linear
from workers.ops.linear.panels import Panels
from workers.ops.native.library import library

INT8_COLUMNS = 65536  # sums of more products of bytes would not fit 32 bits


class BlockLinear:
    """y = x Wᵀ + b over blocks [out, bytes] of a GGUF format, of which `columns` are the weight's. Deterministic."""

    def __init__(self, blocks: Tensor, columns: int, bias: Tensor | None, weight_format: str) -> None:
        self.weight_format = weight_format
        self.num_bytes = blocks.nbytes
        self._compute: Callable[[Tensor], Tensor]
        if library() is not None:
            self._compute = Panels(blocks, columns, bias, weight_format)
        else:
            self._compute = Linear(dequantise(blocks, weight_format)[:, :columns], bias, deterministic=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x)


class Int8Linear:
    """y = x Wᵀ + b with W rounded to 8 bits under one scale for each of its rows. Deterministic."""

    weight_format = "int8"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        columns = weight.shape[1]
        if columns > INT8_COLUMNS:
            raise ValueError(f"int8 weights have at most {INT8_COLUMNS} columns, these {columns}; take q8_0")
        numbers, scales = rounded_rows(weight)
        self.num_bytes = numbers.nbytes + scales.nbytes
        self._compute: Callable[[Tensor], Tensor]
        if library() is not None:
            rows = torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=1)  # [out, 4 + columns]
            self._compute = Panels(rows, columns, bias, "int8")
        else:
            self._compute = Linear(numbers * scales, bias, deterministic=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x)


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] as int8 numbers [out, in] times scales [out, 1]: each row's largest becomes 127."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = torch.where(scales > 0, weight / scales, 0).round().to(torch.int8)
    return numbers, scales
