"""What makes one rank's part of a model behave as the whole: a sum or a gathering around a part's own mathematics.

Knows a tensor group; knows no layer. Source: Shoeybi et al., Megatron-LM (2019).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workers.ops.collective import TensorGroup


@dataclass(frozen=True, slots=True)
class Embedding:
    """The rows of `weight` [vocab, hidden] for tokens [tokens]."""

    weight: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


@dataclass(frozen=True, slots=True)
class PartialEmbedding:
    """The same where `weight` holds the vocabulary from token `first` on: zeros for tokens outside of it."""

    weight: Tensor
    first: int

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.first
        outside = (rows < 0) | (rows >= len(self.weight))
        return self.weight[rows.masked_fill(outside, 0)].masked_fill(outside[:, None], 0)


@dataclass(frozen=True, slots=True)
class Reduced:
    """The sum over the group's ranks of what each one's `part` answers, on all of them."""

    part: Callable[[Tensor], Tensor]
    group: TensorGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.part(x))


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the ranks' `part`s answer, side by side, on the group's first rank; None on the others."""

    part: Callable[[Tensor], Tensor]
    group: TensorGroup
    widths: tuple[int, ...]  # of each rank's answer

    def __call__(self, x: Tensor) -> Tensor | None:
        return self.group.gather(self.part(x), self.widths)
