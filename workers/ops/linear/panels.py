"""Packs weights into panels for the native kernels, and calls them. Knows sizes; the kernels know the formats.

pack:    weights in their format -> panels, on huge pages
linear:  x, panels, bias -> y, on torch's number of threads
"""

import torch
from torch import Tensor

from workers.ops.memory import PAGES
from workers.ops.native.library import kernel, pointer

_OUT_MULTIPLE = 64  # a multiple of every CPU's panel width
# Columns, the bytes that they take in one row of a panel, and further bytes of the row.
_SIZES = {
    "float32": (2, 8, 0),
    "bfloat16": (32, 64, 0),
    "int8": (64, 64, 4),
    "q8_0": (32, 34, 0),
    "q4_0": (32, 18, 0),
    "q4_1": (32, 20, 0),
    "q4_k": (256, 148, 0),  # with its 6-bit scales widened to 8
}


class Panels:
    """y = x Wᵀ + b by a native kernel; see `workers/ops/native/gemm_*.cpp`."""

    def __init__(self, weight: Tensor, columns: int, bias: Tensor | None, layout: str, linear: str = "") -> None:
        """`weight` [out, ...]: float32 numbers, or the bytes of each row, depending on `layout`."""
        assert weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.uint8)
        weight = weight.contiguous()
        self._out, self._in = weight.shape[0], columns
        padded = -(-self._out // _OUT_MULTIPLE) * _OUT_MULTIPLE
        width, width_bytes, row_bytes = _SIZES[layout]
        self._panels = PAGES.empty(padded * (-(-columns // width) * width_bytes + row_bytes))
        kernel(f"pack_{layout}")(pointer(weight), pointer(self._panels), self._out, columns)
        self._bias = torch.zeros(padded)
        if bias is not None:
            self._bias[: self._out] = bias
        self._linear = kernel(f"linear_{linear or layout}")
        self._panels_at, self._bias_at = pointer(self._panels), pointer(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.shape[1] == self._in
        x, rows = x.contiguous(), x.shape[0]
        y = torch.empty(rows, self._out)
        threads = torch.get_num_threads()
        self._linear(pointer(x), self._panels_at, self._bias_at, pointer(y), rows, self._in, self._out, threads)
        return y
