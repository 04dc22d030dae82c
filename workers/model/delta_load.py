"""Loads a linear-attention layer: which rows of its tensors one rank takes, and in which order.

Knows the two formats of Qwen's checkpoints; makes no linear layer but that of the gates.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.model.delta_net import DeltaNet
from workers.model.description import LinearAttentionConfig, ModelConfig
from workers.model.shard import ModelShard, Range
from workers.model.weights import Weights
from workers.ops.linear import LinearMethod


def load_delta_net(
    weights: Weights, prefix: str, config: ModelConfig, shard: ModelShard, make: Callable[[Tensor], LinearMethod]
) -> tuple[Tensor, DeltaNet]:
    """The rows [kv_heads * channels + outputs * value_dim, hidden] of the projection before it, and the layer.

    `config` is of the whole model. `make`: the linear layer of the gates, which keep their dtype, as routers do.
    """
    part, linear = shard.part_of(config), config.linear
    assert linear is not None and part.linear is not None
    first, end = (head * linear.value_heads // config.num_kv_heads for head in shard.kv_heads)
    rows = _Rows(weights, linear, (first, end))
    names = [f"{prefix}.{name}.weight" for name in config.names.delta_parts]
    query, key, value, z, b, a = rows.grouped(*names) if linear.grouped else rows.separate(*names)
    outputs = shard.value_heads[0] - first, shard.value_heads[1] - first
    z = torch.unflatten(z, 0, (end - first, -1))[slice(*outputs)].flatten(0, 1)
    conv = _by_kv_head(part.num_kv_heads, rows.of_qkv(f"{prefix}.conv1d.weight")).squeeze(-2)  # [.., channels, kernel]
    return torch.cat([_by_kv_head(part.num_kv_heads, [query, key, value]).flatten(0, 1), z]), DeltaNet(
        sizes=part.linear,
        kv_heads=part.num_kv_heads,
        outputs=outputs,
        gates=make(torch.cat([b, a])),
        conv=conv.float().transpose(1, 2).contiguous(),
        rate=-weights.take(f"{prefix}.A_log", (first, end)).float().exp(),
        bias=weights.take(f"{prefix}.dt_bias", (first, end)).float(),
        norm=weights.take(f"{prefix}.norm.weight").float(),
        rms_eps=config.rms_eps,
    )


def _by_kv_head(kv_heads: int, parts: list[Tensor]) -> Tensor:
    """[kv_heads, channels, ...] of queries, keys and values, so that those of one KV head lie together."""
    return torch.cat([torch.unflatten(part, 0, (kv_heads, -1)) for part in parts], dim=1)


class _Rows:
    """The rows of these value heads, and of the key heads that they read."""

    def __init__(self, weights: Weights, linear: LinearAttentionConfig, value_heads: Range) -> None:
        self._weights = weights
        self._linear = linear
        self._values = value_heads
        self._share = linear.value_heads // linear.key_heads  # value heads that read one key head
        self._keys = value_heads[0] // self._share, value_heads[1] // self._share

    def separate(self, qkv: str, z: str, b: str, a: str) -> list[Tensor]:
        """Rows of q, k, v, z, b and a."""
        features = _times(self._values, self._linear.value_dim)
        gates = [self._weights.take(name, self._values) for name in (b, a)]
        return [*self.of_qkv(qkv), self._weights.take(z, features), *gates]

    def grouped(self, qkvz: str, ba: str) -> list[Tensor]:
        """The same from tensors that have all rows of one key head before those of the next."""
        value_rows = self._share * self._linear.value_dim
        heads = [self._linear.key_dim, self._linear.key_dim, value_rows, value_rows], [self._share, self._share]
        found: list[Tensor] = []
        for name, rows in zip((qkvz, ba), heads, strict=True):
            own = self._weights.take(name, _times(self._keys, sum(rows)))
            parts = torch.split(torch.unflatten(own, 0, (-1, sum(rows))), rows, dim=1)
            found += [part.flatten(0, 1) for part in parts]
        return found

    def of_qkv(self, name: str) -> list[Tensor]:
        """Rows of q, k and v from a tensor that has all of each, in this order."""
        linear = self._linear
        key, value, below = _times(self._keys, linear.key_dim), _times(self._values, linear.value_dim), 0
        parts: list[Tensor] = []
        for (first, end), height in ((key, linear.key_heads * linear.key_dim),) * 2 + ((value, 0),):
            parts.append(self._weights.take(name, (below + first, below + end)))
            below += height
        return parts


def _times(heads: Range, size: int) -> Range:
    return heads[0] * size, heads[1] * size
