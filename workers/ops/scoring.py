"""What a model sets for the attention of each layer: how it makes queries and keys, and weights of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer does with its queries and keys before attention: a norm with weights, a rotation (`rotate`'s cosines
    and sines), a norm without weights. None: it has none."""

    rotation: tuple[Tensor, Tensor] | None = None
    norm: Tensor | None = None  # [heads + kv_heads, head_dim]
    norm_after: bool = False
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Scoring:
    """The score of a query and a key is `scale` times their product, capped unless `softcap` is 0.

    `window`: the keys that a query sees (see `span`). `sinks` [heads]: the score of one more key, without a value, that
    all queries of a head see (Xiao et al., Streaming LLMs, 2023).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """softcap * tanh(scores / softcap)."""
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
