"""The Llama decoder over a flat ragged token axis, with K and V in a paged pool.

Knows the mathematics and the shapes. Knows no file format, no scheduler, no sampling. With x [tokens, hidden]:

    x ← embedding[tokens]
    each layer:  q, k, v = W_qkv · norm(x);  turn q and k by position;  k, v → pool
                 x ← x + W_out · attention(q, pool)
                 x ← x + W_down · (silu(W_gate · norm(x)) * (W_up · norm(x)))
    logits = W_head · norm(x[rows to sample])

Source: Touvron et al., LLaMA (2023); grouped KV heads, Ainslie et al. (2023).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.config import ModelConfig
from workers.model.rope import rope_tables, rotate
from workers.ops.attention import Attention
from workers.ops.batch import RaggedBatch
from workers.ops.linear import Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; q, k, v stand above one another in `qkv`, gate and up in `gate_up`."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    output: Linear  # [hidden, heads * head_dim]
    ffn_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * ffn, hidden]
    down: Linear  # [hidden, ffn]


class Llama:
    """Owned by one rank and called from one thread. Holds weights and position tables, no state between calls."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,  # [vocab, hidden]
        layers: tuple[Layer, ...],
        final_norm: Tensor,  # [hidden]
        head: Linear,  # [vocab, hidden]
        attention: Attention,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.attention = attention
        cos, sin = rope_tables(config.rope, config.head_dim, config.context_length)
        self._cos = cos.to(embedding.device, embedding.dtype)  # [positions, head_dim]
        self._sin = sin.to(embedding.device, embedding.dtype)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor, batch: RaggedBatch, pool: Tensor) -> Tensor:
        """Logits [rows, vocab] for the given rows of the token axis; writes every token's K and V into the pool.

        tokens and positions are [tokens] int64 on the model's device, positions below the context length.
        """
        x = self.embedding[tokens]  # [tokens, hidden]
        cos = self._cos[positions][:, None]  # [tokens, 1, head_dim]
        sin = self._sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            attended = self._attend(layer, index, self._norm(x, layer.attention_norm), cos, sin, batch, pool)
            if index == len(self.layers) - 1:  # all KV is written: only the wanted rows go on
                x, attended = x[rows], attended[rows]
            x = x + layer.output(attended)
            x = x + self._feed_forward(layer, self._norm(x, layer.ffn_norm))
        return self.head(self._norm(x, self.final_norm))

    def _attend(
        self, layer: Layer, index: int, x: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: Tensor
    ) -> Tensor:
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        qk = rotate(qkv[:, : heads + kv_heads], cos, sin)
        query, key, value = qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]
        self.attention.write_kv(pool, key, value, index, batch)
        attended = self.attention.attend(query, pool, index, batch, head_dim**-0.5)  # [tokens, heads, head_dim]
        return attended.flatten(1)

    def _feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)  # [tokens, ffn] each
        return layer.down(F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_eps)
