"""What every linear layer can be asked, whatever holds its weights. Knows no format."""

from typing import Protocol

from torch import Tensor


class LinearMethod(Protocol):
    """y = x Wᵀ + b with fixed W [out, in] and b [out] or none."""

    @property
    def weight_format(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Of the weights as the format stores them, bias and padding left out: what a pass over one row must read."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] to y [rows, out], both float32 on a CPU."""
