"""Linear layers with fixed weights, one `LinearMethod` per weight format; `make_linear` chooses.

float32                  exact
bfloat16                 half the bytes; x stays float32 or nearly so
int8                     a quarter; W and x are rounded to 8 bits, one scale per row
q8_0 q4_1 q4_0 q4_k      blocks as in GGUF files; x is rounded to 8 bits in blocks of 32
"""

from typing import Protocol

from torch import Tensor

from workers.ops.linear.blocks import BLOCK_BYTES, BLOCK_COLUMNS, quantize
from workers.ops.linear.dense import Linear
from workers.ops.linear.quantized import bfloat16_linear, block_linear, int8_linear

__all__ = ["BLOCK_FORMATS", "WEIGHT_FORMATS", "Linear", "LinearMethod", "linear_from_blocks", "make_linear"]

BLOCK_FORMATS = tuple(BLOCK_COLUMNS)
WEIGHT_FORMATS = ("float32", "bfloat16", "int8", *BLOCK_FORMATS)


class LinearMethod(Protocol):
    """y = x Wᵀ + b with fixed W [out, in] and b [out] or none."""

    @property
    def weight_format(self) -> str: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] to y [rows, out], both float32 on a CPU."""


def make_linear(
    weight: Tensor, bias: Tensor | None = None, weight_format: str = "float32", deterministic: bool = False
) -> LinearMethod:
    """y = x Wᵀ + b for weight [out, in] and bias [out], held in `weight_format`.

    deterministic: a row of y has the same bits whatever other rows are in the batch. Formats other than float32 need a
    CPU; they pack the weights at once, so the caller may free `weight`.
    """
    if weight_format == "float32":
        return Linear(weight, bias, deterministic)
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight format {weight_format!r} is unknown; known are {', '.join(WEIGHT_FORMATS)}")
    if weight.device.type != "cpu":
        raise ValueError(f"weight format {weight_format!r} needs a CPU; on {weight.device} take float32")
    if weight_format == "bfloat16":
        return bfloat16_linear(weight.float(), bias, deterministic)
    if weight_format == "int8":
        return int8_linear(weight.float(), bias)
    return block_linear(quantize(weight, weight_format), weight.shape[1], bias, weight_format)


def linear_from_blocks(blocks: Tensor, columns: int, bias: Tensor | None, weight_format: str) -> LinearMethod:
    """The same for a GGUF file's own blocks [out, bytes] uint8 of a matrix with `columns` columns."""
    expected = -(-columns // BLOCK_COLUMNS[weight_format]) * BLOCK_BYTES[weight_format]
    if blocks.shape[1] != expected:
        raise ValueError(
            f"{columns} columns in {weight_format} take {expected} bytes a row, these take {blocks.shape[1]}"
        )
    return block_linear(blocks, columns, bias, weight_format)
