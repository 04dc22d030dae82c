"""The feed-forward part of a layer: a gated MLP, or a mixture of experts.

Knows no layer and no names. Source: Shazeer, GLU variants (2020); routing: Fedus et al., Switch (2021), with several
experts per token as in Jiang et al., Mixtral (2024).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.ops.fused import gated
from workers.ops.linear import LinearMethod


@dataclass(frozen=True, slots=True)
class FeedForward:
    """W_down · (activation(W_gate · x) * (W_up · x)); `gate_up` has gate and up stacked."""

    gate_up: LinearMethod  # [2 * ffn, hidden]
    down: LinearMethod  # [hidden, ffn]
    activation: str  # one that `gated` knows

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x), self.activation))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert for every token, weighted by sigmoid(gate · x)."""

    feed_forward: FeedForward
    gate: LinearMethod  # [1, hidden]

    def __call__(self, x: Tensor) -> Tensor:
        # Not torch.sigmoid: on a CPU it computes the last few numbers of a tensor differently from full vectors, so the
        # bits of a row would depend on the other rows.
        return self.feed_forward(x) / (-self.gate(x)).exp_().add_(1.0)


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum of each token's `per_token` best experts, weighted by the router's softmax in float32.

    An expert computes only the rows routed to it. A row adds its experts in ascending order, whatever the other rows.
    """

    router: LinearMethod  # [experts, hidden]
    experts: tuple[FeedForward, ...]
    per_token: int
    normalise: bool
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(dim=-1, dtype=torch.float32)  # [tokens, experts]
        weights, chosen = scores.topk(self.per_token, dim=-1)  # [tokens, per_token] each
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        total = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            answer = self.experts[expert](x[rows]) * weights[rows, places, None]
            total.index_add_(0, rows, answer.to(x.dtype))
        return total if self.shared is None else total + self.shared(x)
