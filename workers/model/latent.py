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

from workers.model.description import LatentConfig
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

    sizes: LatentConfig
    query_norm: Tensor | None  # [query_rank]
    query_up: LinearMethod | None  # [heads * query_dim, query_rank]
    key_norm: Tensor  # [rank]
    to_latent: HeadsLinear | BatchedLinear  # W_UK: plain_dim to rank

    def __call__(self, down: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query [tokens, heads, rank + rotary_dim] and key [tokens, 1, rank + rotary_dim].

        `down` [tokens, query_rank (or heads * query_dim) + rank + rotary_dim]; cos and sin as in `rotate`.
        """
        rank, rotary, plain = self.sizes.rank, self.sizes.rotary_dim, self.sizes.plain_dim
        query, latent, rotated_key = down.tensor_split([down.shape[1] - rank - rotary, down.shape[1] - rotary], dim=1)
        if self.query_up is not None:
            query = self.query_up(rms_norm(query, self.query_norm, _EPS))
        query = torch.unflatten(query, 1, (-1, plain + rotary))
        rotated = rotate(torch.cat([query[..., plain:], rotated_key[:, None]], dim=1), cos, sin)
        key = torch.cat([rms_norm(latent, self.key_norm, _EPS), rotated[:, -1]], dim=1)
        return torch.cat([self.to_latent(query[..., :plain]), rotated[:, :-1]], dim=2), key[:, None]


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """From attention's result [rows, heads * (rank + rotary_dim)], whose rotated part is dropped, to the layer's."""

    sizes: LatentConfig
    from_latent: HeadsLinear | BatchedLinear  # W_UV: rank to value_dim
    output: Callable[[Tensor, Change | None], Tensor]

    def __call__(self, x: Tensor, change: Change | None) -> Tensor:
        latents = torch.unflatten(x, 1, (-1, self.sizes.rank + self.sizes.rotary_dim))[..., : self.sizes.rank]
        return self.output(self.from_latent(latents).flatten(1), change)
