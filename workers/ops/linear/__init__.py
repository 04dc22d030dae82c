"""Linear layers with fixed weights, one `LinearMethod` per weight format; `make_linear` chooses.

float32     exact; our own panels on a CPU, whatever is fastest without them
bfloat16    half the bytes; x stays float32, so only the weights are rounded
"""

from torch import Tensor

from workers.ops.linear.dense import Bfloat16Linear, Linear
from workers.ops.linear.method import LinearMethod

__all__ = ["WEIGHT_FORMATS", "Linear", "LinearMethod", "make_linear"]

WEIGHT_FORMATS = ("float32", "bfloat16")


def make_linear(
    weight: Tensor, bias: Tensor | None = None, weight_format: str = "float32", deterministic: bool = False
) -> LinearMethod:
    """y = x Wᵀ + b for weight [out, in] and bias [out], held in `weight_format`.

    deterministic: a row of y has the same bits whatever rows lie beside it. Formats other than float32 need weights
    in float32 on a CPU, and always are.
    """
    if weight_format == "float32":
        return Linear(weight, bias, deterministic)
    if weight_format == "bfloat16":
        return Bfloat16Linear(weight, bias)
    raise ValueError(f"weight format {weight_format!r} is unknown; known are {', '.join(WEIGHT_FORMATS)}")
