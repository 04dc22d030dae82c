"""Linear layers in fp8 (e4m3): one scale for each row of W, made at load, and for each row of x, made at each call.

On a GPU cuBLASLt multiplies the numbers and applies both scales to the sums. On a CPU the same numbers are multiplied
in float32, which is a reference and no faster.
"""

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.ops import narrow
from workers.ops.linear.dense import Linear

MULTIPLE = 16  # of rows and columns of W, as cuBLASLt requires
MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


class FP8Linear:
    """y = x Wᵀ + b with rows of W and x rounded to e4m3, for W with multiples of `MULTIPLE` rows and columns.

    On a GPU x is bfloat16 or float16, and y's row may depend on how many rows there are.
    """

    weight_format = "fp8"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, scales = rounded_rows(weight)  # [out, in]
        self.scales = scales.t()  # [1, out]
        self.bias = bias
        self._reference = None if weight.is_cuda else Linear(self.weight.float() * scales, bias, deterministic=True)

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = rounded_rows(x)
        if self._reference is not None:
            return self._reference(numbers.float() * scales).to(x.dtype)
        return multiply(numbers, scales, self, x.dtype)


def multiply(numbers: Tensor, scales: Tensor, linear: FP8Linear, dtype: torch.dtype) -> Tensor:
    """y [rows, out] of `dtype` for rounded rows [rows, in] and their scales [rows, 1].

    Sums keep float32's 24 bits: cuBLASLt refused the faster ones of 14 bits on an H200.
    """
    return torch._scaled_mm(
        numbers, linear.weight.t(), scales, linear.scales, linear.bias,
        out_dtype=dtype, use_fast_accum=False,
    )  # fmt: skip


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, size] as e4m3 numbers and float32 scales [rows, 1]; a row's largest number becomes 448."""
    if not x.is_cuda:
        return narrow.rounded_rows(x.float(), torch.float8_e4m3fn)
    from workers.ops import triton_fp8  # only where Triton is installed: torch for CUDA brings it

    return triton_fp8.rounded_rows(x)


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Multiplies some rows of `dtype`. Raises `ModelError` unless `device` is a GPU that can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        raise ModelError(
            f"engine.weights is fp8, which needs a GPU of compute capability 8.9 or more (Ada, Hopper); on {device} "
            "leave it out" + (", or take int8" if device.type == "cpu" else "")
        )
    weight, x = (torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)) for rows in (48, 5))
    wanted = FP8Linear(weight.to(dtype))(x.to(dtype))
    try:
        found = FP8Linear(weight.to(device, dtype))(x.to(device, dtype)).cpu()
    except RuntimeError as error:
        raise ModelError(
            f"engine.weights is fp8, but its products fail on {device} ({str(error).splitlines()[0]}); leave it out"
        ) from error
    if not (found.float() - wanted.float()).norm() < 0.01 * wanted.float().norm():
        raise ModelError(f"engine.weights is fp8, but its products are wrong on {device}; leave it out")
