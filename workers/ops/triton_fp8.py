"""Rounds rows to fp8 (e4m3) on a GPU, as a Triton kernel: the bits of `narrow.rounded_rows`.

A program takes one row. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = 8192  # columns, from which on a program has more warps


def rounded_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x [rows, size] as numbers [rows, size] and float32 scales [rows, 1].

    `dtype`: float32 leaves the last step out, which the interpreter rounds otherwise than a GPU.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, size = x.shape
    numbers = torch.empty(rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _round[(rows,)](
        x, x.stride(0), numbers, scales, size,
        SIZE=triton.next_power_of_2(size), num_warps=16 if size > _WIDE else 8,
    )  # fmt: skip
    return numbers, scales


@triton.jit  # type: ignore[untyped-decorator]
def _round(x, x_stride, numbers, scales, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = at < size
    values = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) * (1.0 / 448.0), 1.1754943508222875e-38)  # the least normal number
    tl.store(scales + row, scale)
    rounded = values * tl.div_rn(1.0, scale)  # NaN for infinity, as for NaN
    tl.store(numbers + row * size + at, rounded.to(numbers.dtype.element_ty), inside)
