"""Weights from a model folder into a decoder.

Knows which tensor goes where and what is fused. On a CPU everything computes in float32: half-precision matrix
products are nine times slower there without AVX-512 or AMX.
"""

from functools import partial

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.decoder import Decoder, Layer
from workers.model.description import LayerConfig, ModelConfig
from workers.model.feed_forward import Experts, FeedForward, SharedExpert
from workers.model.folder import ModelFolder, check_tensors
from workers.model.gguf_blocks import GGUFBlocks
from workers.model.weights import Weights, fuse
from workers.ops.attention import SDPA, Attention
from workers.ops.linear import WEIGHT_FORMATS, LinearMethod, linear_from_blocks, make_linear

FORMATS = (*WEIGHT_FORMATS, "gguf")


def load_decoder(
    folder: ModelFolder,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention = SDPA,
    weight_format: str = "float32",
    deterministic: bool = False,
) -> Decoder:
    """The folder's model, ready to compute on `device` in `dtype` (float32 on a CPU whatever is asked).

    `weight_format` is that of the linear layers; embeddings, norms and routers stay in `dtype`. "gguf": the blocks of
    the file that the folder was converted from, float32 where they are in a format that has no kernel.
    `deterministic`: a row's bits do not depend on the rows beside it, provided that `attention` is batch invariant
    too. Raises `ModelError` when a tensor is missing, has the wrong shape, is not known, or holds NaN or infinity.
    """
    if weight_format not in FORMATS:
        raise ModelError(f"weight format {weight_format!r} is not supported; supported: {', '.join(FORMATS)}")
    if weight_format != "float32" and device.type != "cpu":
        raise ModelError(f"weight format {weight_format!r} needs a CPU; on {device} take float32 and set the dtype")
    config = read_model_config(folder.path)
    check_tensors(folder.path, config)
    dtype = torch.float32 if device.type == "cpu" else dtype
    weights = Weights(folder.path, device, dtype)
    blocks = GGUFBlocks(folder.path) if weight_format == "gguf" else None
    return _Assembly(config, weights, blocks, weight_format, deterministic).decoder(attention)


class _Assembly:
    """One decoder in the making."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        blocks: GGUFBlocks | None,
        weight_format: str,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._weights = weights
        self._blocks = blocks
        self._weight_format = "float32" if blocks else weight_format  # of what is not in blocks
        self._make = partial(make_linear, deterministic=deterministic)

    def decoder(self, attention: Attention) -> Decoder:
        config, names = self._config, self._config.names
        embedding = self._weights.take(f"{names.root}.embed_tokens.weight")
        head_name = f"{names.root}.embed_tokens.weight" if config.tie_embeddings else f"{names.head}.weight"
        head = embedding if config.tie_embeddings else self._weights.take(head_name)
        layers = tuple(self._layer(f"{names.root}.layers.{index}", layer) for index, layer in enumerate(config.layers))
        final_norm = self._norm(names.root, "norm")
        assert final_norm is not None
        # As GGUF files have it: logits are read off too few columns to be rounded to four bits.
        weight_format = "q8_0" if self._weight_format in ("q4_0", "q4_1", "q4_k") else self._weight_format
        method = self._method([head_name], head, None, weight_format)
        return Decoder(config, embedding, layers, final_norm, method, attention)

    def _layer(self, prefix: str, layer: LayerConfig) -> Layer:
        config, names = self._config, self._config.names
        attention_norm, ffn_norm = self._norm(prefix, names.attention_norm), self._norm(prefix, names.ffn_norm)
        assert attention_norm is not None and ffn_norm is not None
        return Layer(
            attention_norm=attention_norm,
            qkv=self._linear(prefix, names.qkv, config.qkv_bias),
            qk_norm=self._qk_norm(prefix),
            output=self._linear(prefix, (names.output,), config.output_bias),
            attention_post_norm=self._norm(prefix, names.attention_post_norm),
            ffn_norm=ffn_norm,
            feed_forward=self._experts(prefix) if layer.has_experts else self._feed_forward(prefix),
            ffn_post_norm=self._norm(prefix, names.ffn_post_norm),
        )

    def _qk_norm(self, prefix: str) -> Tensor | None:
        """The weights of q's and of k's norm, once for each head."""
        query, key = (self._norm(prefix, name) for name in (self._config.names.query_norm, self._config.names.key_norm))
        if query is None or key is None:
            return None
        return torch.stack([query] * self._config.num_heads + [key] * self._config.num_kv_heads)

    def _feed_forward(self, prefix: str) -> FeedForward:
        names, bias = self._config.names, self._config.mlp_bias
        return FeedForward(
            gate_up=self._linear(prefix, names.gate_up, bias),
            down=self._linear(prefix, (names.down,), bias),
            activation=self._config.activation,
        )

    def _experts(self, prefix: str) -> Experts:
        names, experts = self._config.names, self._config.experts
        assert experts is not None
        shared = None
        if experts.shared_ffn_size:
            gate = self._weights.take(f"{prefix}.{names.shared_gate}.weight")
            shared = SharedExpert(self._expert(f"{prefix}.{names.shared_expert}"), self._make(gate))
        return Experts(
            router=self._make(self._weights.take(f"{prefix}.{names.router}.weight")),
            experts=tuple(self._expert(f"{prefix}.{names.experts}.{expert}") for expert in range(experts.count)),
            per_token=experts.per_token,
            normalise=experts.normalise,
            shared=shared,
        )

    def _expert(self, prefix: str) -> FeedForward:
        names = self._config.names
        return FeedForward(
            gate_up=self._linear(prefix, names.expert_gate_up, bias=False),
            down=self._linear(prefix, (names.expert_down,), bias=False),
            activation=self._config.activation,
        )

    def _norm(self, prefix: str, name: str) -> Tensor | None:
        """The norm's weight, or None for a name that the family does not have."""
        if not name:
            return None
        weight = self._weights.take(f"{prefix}.{name}.weight")
        return weight + self._config.norm_offset if self._config.norm_offset else weight

    def _linear(self, prefix: str, parts: tuple[str, ...], bias: bool) -> LinearMethod:
        names = [f"{prefix}.{part}.weight" for part in parts]
        weight = fuse([self._weights.take(name) for name in names])
        offset = fuse([self._weights.take(f"{prefix}.{part}.bias") for part in parts]) if bias else None
        return self._method(names, weight, offset, self._weight_format)

    def _method(self, names: list[str], weight: Tensor, bias: Tensor | None, weight_format: str) -> LinearMethod:
        """What multiplies by `weight`, which is the tensors `names`: by their blocks if those are wanted and fit."""
        found = self._blocks.take(names, weight) if self._blocks else None
        if found is None:
            return self._make(weight, bias, weight_format)
        kind, blocks = found
        return linear_from_blocks(blocks, weight.shape[1], bias, kind)
