"""A linear layer with fixed weights, in the fastest exact form that this build of torch has.

On a CPU in float32, few rows at a time are memory-bound and gain up to 2x from weights that oneDNN has reordered
once; many rows are compute-bound and run as fast on the plain ones. Both forms are kept: the plain weights are
mapped from the checkpoint, hence shared between processes and evictable, and only the reordered copy is private.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# Measured on AVX2: packed is 1.0x at 1 row, 1.7-2.0x at 4, 1.2-1.5x at 16, 1.1x at 64, and loses from 128 on.
PACKED_ROWS = 64


class Linear:
    """y = x Wᵀ + b, with W [out, in] and b [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed = _pack(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None or x.shape[0] > PACKED_ROWS:
            return F.linear(x, self.weight, self.bias)
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return packed


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own order, or None where that is of no use. The two ops are private: hence the check."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _can_pack():
        return None
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return reordered


@functools.cache
def _can_pack() -> bool:
    """Whether this torch has the reordered form and it computes what `F.linear` does."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(y, F.linear(x, weight))
