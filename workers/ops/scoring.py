"""How attention makes weights of queries and keys: what a model sets for each layer."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
