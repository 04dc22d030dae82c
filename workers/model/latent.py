"""Latent attention (MLA): all heads attend to one vector a token, which is key and value.

Knows one layer's weights; knows no pool, no file and no other rank. With c the latent of a token and r its rotated key:

    key = value = (c, r)                       of all heads
    a head's query = (q · W_UK, rotated q)     since q · (W_UK c) = (q · W_UK) · c
    a head's output = W_UV · Σ weight * c

so no head's own keys and values are ever made. Source: DeepSeek-AI, DeepSeek-V2 (2024), with W_UK and W_UV absorbed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.description import MLAConfig
from workers.ops.fused import rms_norm, rotate
from workers.ops.linear import LinearMethod
from workers.ops.lora import Change

_EPS = 1e-6  # of the latents' norms, whatever the model's `rms_norm_eps`


@dataclass(frozen=True, slots=True)
class HeadsLinear:
    """A linear layer for each head: x [tokens, heads, in] to [tokens, heads, out]."""

    heads: tuple[LinearMethod, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([linear(x[:, head].contiguous()) for head, linear in enumerate(self.heads)], dim=1)


@dataclass(frozen=True, slots=True)
class BatchedLinear:
    """The same in one product, for a GPU."""

    weight: Tensor  # [heads, in, out]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Latent:
    """From a layer's first projection to query and key. `query_up` and `query_norm`: None without a query latent."""

    sizes: MLAConfig
    query_norm: Tensor | None  # [q_lora_rank]
    query_up: LinearMethod | None  # [heads * qk_head_dim, q_lora_rank]
    key_norm: Tensor  # [kv_lora_rank]
    to_latent: HeadsLinear | BatchedLinear  # W_UK: qk_nope_head_dim to kv_lora_rank

    def __call__(self, down: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query [tokens, heads, head_dim] and key [tokens, 1, head_dim], of kv_lora_rank + qk_rope_head_dim.

        `down` [tokens, q_lora_rank (or heads * qk_head_dim) + head_dim]; cos and sin as in `rotate`.
        """
        rank, rotary, plain = self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim, self.sizes.qk_nope_head_dim
        query, latent, rotated_key = down.tensor_split([down.shape[1] - rank - rotary, down.shape[1] - rotary], dim=1)
        if self.query_up is not None:
            query = self.query_up(rms_norm(query, self.query_norm, _EPS))
        query = torch.unflatten(query, 1, (-1, plain + rotary))
        rotated = rotate(torch.cat([query[..., plain:], rotated_key[:, None]], dim=1), cos, sin)
        key = torch.cat([rms_norm(latent, self.key_norm, _EPS), rotated[:, -1]], dim=1)
        return torch.cat([self.to_latent(query[..., :plain]), rotated[:, :-1]], dim=2), key[:, None]


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """From attention's result [rows, heads * head_dim], whose rotated part is dropped, to the layer's."""

    sizes: MLAConfig
    from_latent: HeadsLinear | BatchedLinear  # W_UV: kv_lora_rank to v_head_dim
    output: Callable[[Tensor, Change | None], Tensor]

    def __call__(self, x: Tensor, change: Change | None) -> Tensor:
        rank, rotary = self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim
        latents = torch.unflatten(x, 1, (-1, rank + rotary))[..., :rank]
        return self.output(self.from_latent(latents).flatten(1), change)
