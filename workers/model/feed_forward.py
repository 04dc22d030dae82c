"""The feed-forward half of a layer: one gated pair of linears, or a router's choice among many.

Knows the mathematics; knows no layer and no names. Source: Shazeer, GLU variants (2020); routing: Fedus et al., Switch
(2021), with several experts a token as in Jiang et al., Mixtral (2024).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.description import GELU_TANH, SILU
from workers.ops.linear import LinearMethod

Activation = Callable[[Tensor], Tensor]


def activation(name: str, deterministic: bool) -> Activation:
    """The function of that name; `deterministic`: a number's answer does not depend on where it stands in the tensor.

    On a CPU torch's own silu, gelu and sigmoid compute a tensor's last few numbers, which do not fill a vector
    register, in another way than the rest. exp and tanh do not, so what is made of them does not either, at 2-3 times
    the cost.
    """
    plain: dict[str, Activation] = {SILU: F.silu, GELU_TANH: partial(F.gelu, approximate="tanh")}
    composed: dict[str, Activation] = {SILU: _silu, GELU_TANH: _gelu_tanh}
    return (composed if deterministic else plain)[name]


def _silu(x: Tensor) -> Tensor:
    return x / (-x).exp_().add_(1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """W_down · (activation(W_gate · x) * (W_up · x)), gate standing above up in `gate_up`."""

    gate_up: LinearMethod  # [2 * ffn, hidden]
    down: LinearMethod  # [hidden, ffn]
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [tokens, ffn] each
        return self.down(self.activation(gate) * up)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A feed-forward that every token passes, weighted by sigmoid(gate · x)."""

    feed_forward: FeedForward
    gate: LinearMethod  # [1, hidden]

    def __call__(self, x: Tensor) -> Tensor:
        return self.feed_forward(x) / (-self.gate(x)).exp_().add_(1.0)


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum of each token's `per_token` best experts, weighted by the router's softmax in float32.

    An expert sees only the rows that chose it. A row adds its experts in the order of their numbers, whatever other
    rows there are.
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
