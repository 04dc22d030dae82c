"""The feed-forward part of a layer: a gated MLP, or a mixture of experts.

Knows no layer and no names. Source: Shazeer, GLU variants (2020); routing: Fedus et al., Switch (2021), with several
experts per token as in Jiang et al., Mixtral (2024); groups and corrections: DeepSeek-AI, DeepSeek-V3 (2024).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.description import ExpertsConfig
from workers.ops.fused import gated
from workers.ops.linear import Linear, LinearMethod
from workers.ops.lora import DOWN, GATE_UP, Change


@dataclass(frozen=True, slots=True)
class FeedForward:
    """W_down · (activation(W_gate · x) * (W_up · x)); `gate_up` has gate and up stacked."""

    gate_up: LinearMethod  # [2 * ffn, hidden]
    down: LinearMethod  # [hidden, ffn]
    activation: str  # one that `gated` knows

    def __call__(self, x: Tensor, change: Change | None = None) -> Tensor:
        gate_up = self.gate_up(x)
        if change is not None:
            change(GATE_UP, x, gate_up)
        inner = gated(gate_up, self.activation)
        y = self.down(inner)
        if change is not None:
            change(DOWN, inner, y)
        return y


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
class ExpertRouter:
    """Chooses each token's best experts, weighted in float32.

    With a `correction` [experts] float32, a group is as good as its best two experts together, without as its best.
    """

    weight: LinearMethod  # [experts, hidden]
    config: ExpertsConfig
    correction: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of x [tokens, hidden], [tokens, per_token] each."""
        config, scores = self.config, self.weight(x).float()  # [tokens, experts]
        # The sigmoid: see `SharedExpert`.
        shares = (-scores).exp_().add_(1.0).reciprocal_() if config.sigmoid else scores.softmax(dim=-1)
        if self.correction is not None:
            scores = shares + self.correction
        if config.groups > 1:
            grouped = torch.unflatten(scores, 1, (config.groups, -1))
            of_group = grouped.amax(-1) if self.correction is None else grouped.topk(2, dim=-1).values.sum(-1)
            is_out = torch.ones_like(of_group, dtype=torch.bool)
            is_out.scatter_(1, of_group.topk(config.top_groups, dim=-1).indices, False)
            scores = grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)
        chosen = scores.topk(config.per_token, dim=-1).indices
        weights = shares.gather(1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True) if config.normalize else weights
        return weights * config.scale if config.scale != 1.0 else weights, chosen


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum of each token's experts, their outputs or inputs weighted.

    An expert computes only the rows routed to it. A row adds its experts in ascending order, whatever the other rows.
    """

    router: ExpertRouter
    experts: tuple[FeedForward, ...]
    shared: SharedExpert | FeedForward | None = None

    def __call__(self, x: Tensor, change: Change | None = None) -> Tensor:
        """Adapters change no experts."""
        weights, chosen = self.router(x)
        total = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            weight, compute, its = weights[rows, places, None], self.experts[expert], x[rows]
            answer = compute((its * weight).to(x.dtype)) if self.router.config.scales_input else compute(its) * weight
            total.index_add_(0, rows, answer.to(x.dtype))
        return total if self.shared is None else total + self.shared(x)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The same in two grouped matrix products, for a GPU: the host does not wait to learn the router's choice.

    Biases are [experts, out]; None: there are none.
    """

    router: ExpertRouter
    gate_up: Tensor  # [experts, 2 * ffn, hidden]
    down: Tensor  # [experts, hidden, ffn]
    activation: str
    shared: SharedExpert | FeedForward | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(self, x: Tensor, change: Change | None = None) -> Tensor:
        weights, chosen = self.router(x)
        sorted_experts, order = chosen.flatten().sort()
        experts = torch.arange(len(self.down), device=x.device)
        ends = torch.searchsorted(sorted_experts, experts, right=True, out_int32=True)  # of each expert's rows
        rows = x[order // self.router.config.per_token]
        if self.router.config.scales_input:
            rows = (rows * weights.flatten()[order, None]).to(x.dtype)
            weights = torch.ones_like(weights)
        gate_up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        if self.gate_up_bias is not None:
            gate_up += self.gate_up_bias[sorted_experts]
        down = torch._grouped_mm(gated(gate_up, self.activation), self.down.transpose(1, 2), offs=ends)
        if self.down_bias is not None:
            down += self.down_bias[sorted_experts]
        answers = torch.empty_like(rows)
        answers[order] = down
        total = (answers.view(*chosen.shape, x.shape[-1]) * weights[..., None]).sum(dim=1).to(x.dtype)
        return total if self.shared is None else total + self.shared(x)


def grouped(experts: Experts) -> Experts | GroupedExperts:
    """The experts as `GroupedExperts` where that needs no wait; their weights are copied."""
    pairs = [(each.gate_up, each.down) for each in experts.experts]
    linears = [(up, down) for up, down in pairs if isinstance(up, Linear) and isinstance(down, Linear)]
    if len(linears) < len(pairs) or not all(_can_group(each.weight) for each in linears[0]):
        return experts
    gate_up, down = (torch.stack([each.weight for each in layer]) for layer in zip(*linears, strict=True))
    biases = [[each.bias for each in layer if each.bias is not None] for layer in zip(*linears, strict=True)]
    return GroupedExperts(
        experts.router,
        gate_up,
        down,
        experts.experts[0].activation,
        experts.shared,
        *(torch.stack(each) if each else None for each in biases),
    )


def _can_group(weight: Tensor) -> bool:
    """Whether matrices such as this one can be grouped without a wait: bfloat16 with rows of whole 16 bytes.

    Elsewhere than on Hopper and Blackwell (compute capability 9 and 10) torch multiplies group after group, and first
    copies their sizes to the host, which no CUDA graph can hold.
    """
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or weight.shape[1] % 8:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
