"""Tensor-parallel wrappers around a rank's part of a layer: a sum or a gather over the tensor group.

Knows no layer. Source: Shoeybi et al., Megatron-LM (2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workers.ops.collective import TensorGroup


@dataclass(frozen=True, slots=True)
class PartialEmbedding:
    """An embedding whose `weight` holds part of the vocabulary, from token `first` on: zeros for other tokens."""

    weight: Tensor
    first: int

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.first
        outside = (rows < 0) | (rows >= len(self.weight))
        return self.weight[rows.masked_fill(outside, 0)].masked_fill(outside[:, None], 0)


@dataclass(frozen=True, slots=True)
class Reduced:
    """The sum of `part`'s outputs over the group's ranks, on all of them."""

    part: Callable[..., Tensor]
    group: TensorGroup

    def __call__(self, *x: Any) -> Tensor:
        return self.group.all_reduce(self.part(*x))


@dataclass(frozen=True, slots=True)
class Gathered:
    """The outputs of all ranks' `part`s side by side, on the group's first rank; None on the others."""

    part: Callable[[Tensor], Tensor]
    group: TensorGroup
    widths: tuple[int, ...]  # of each rank's output

    def __call__(self, x: Tensor) -> Tensor | None:
        return self.group.gather(self.part(x), self.widths)
