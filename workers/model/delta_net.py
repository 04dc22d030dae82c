"""A linear-attention layer: Gated DeltaNet, as in Qwen3-Next and Qwen3.5.

Knows the weights of the heads that one rank computes; knows neither projections before and after it nor where the
state lies in a block. Source: Yang et al., Gated Delta Networks (2025).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.description import LinearAttentionConfig
from workers.ops.batch import RaggedBatch
from workers.ops.delta_rule import Gates, causal_conv, gated_delta_rule
from workers.ops.fused import SILU, gated, rms_norm
from workers.ops.linear import LinearMethod


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Tensors are float32. `sizes` has the heads computed here; `outputs` are those of them whose output is wanted.

    With channels = the queries, keys and values of the heads that belong to one KV head, in this order.
    """

    sizes: LinearAttentionConfig
    kv_heads: int
    outputs: tuple[int, int]
    gates: LinearMethod  # [2 * value_heads, hidden]: b, then a
    conv: Tensor  # [kv_heads, kernel, channels]
    rate: Tensor  # [value_heads]
    bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    rms_eps: float

    def __call__(self, x: Tensor, projected: Tensor, states: Tensor, batch: RaggedBatch, block_size: int) -> Tensor:
        """[tokens, outputs * value_dim] for x [tokens, hidden] and projected [tokens, kv_heads * channels + outputs *
        value_dim], which ends with the outputs' gates z. `states` [blocks, kv_heads, numbers]: see
        `LinearAttentionConfig.state_numbers`.
        """
        sizes, kv_heads, (first, end) = self.sizes, self.kv_heads, self.outputs
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        mixed, z = torch.split(projected.float(), [2 * keys + values, (end - first) * sizes.value_dim], dim=-1)
        b, a = self.gates(x).float().chunk(2, dim=-1)
        conv_states, delta_states = torch.split(states, list(sizes.state_numbers(kv_heads)), dim=-1)
        mixed = mixed.reshape(len(x), kv_heads, -1)
        mixed = causal_conv(mixed, self.conv, conv_states, batch, block_size)
        query, key, value = torch.split(mixed, [keys // kv_heads, keys // kv_heads, values // kv_heads], dim=-1)
        query, key = (each.reshape(-1, sizes.key_heads, sizes.key_dim) for each in (query, key))
        value = value.reshape(-1, sizes.value_heads, sizes.value_dim)
        gates = Gates(a.contiguous(), b.contiguous(), self.rate, self.bias)
        output = gated_delta_rule(query, key, value, gates, delta_states, batch, block_size)[:, first:end]
        normed = rms_norm(output.contiguous(), self.norm, self.rms_eps)
        both = torch.cat([z.reshape(normed.shape), normed], dim=-1)  # [tokens, outputs, 2 * value_dim]
        return gated(both.flatten(0, 1), SILU).view(len(x), -1).to(x.dtype)
