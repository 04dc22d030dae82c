"""Loads the weights of a model folder into a decoder.

Knows where each tensor goes, which are fused, and which part of each a rank holds. On a CPU everything computes in
float32: half-precision matrix products are nine times slower there without AVX-512 or AMX.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.config import ParallelConfig
from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.decoder import Changeable, Decoder, Layer, Output, Transform
from workers.model.delta_load import load_delta_net
from workers.model.description import LayerConfig, MLAConfig, ModelConfig
from workers.model.feed_forward import ExpertRouter, Experts, FeedForward, GroupedExperts, SharedExpert, grouped
from workers.model.folder import ModelFolder, check_tensors
from workers.model.gguf.blocks import GGUFBlocks
from workers.model.latent import BatchedLinear, HeadsLinear, Latent, LatentOutput
from workers.model.parallel import Gathered, PartialEmbedding, Reduced
from workers.model.shard import ModelShard, Range, shard_of, split_units
from workers.model.weights import Part, Weights, fuse, halves
from workers.ops.attention import SDPA, Attention
from workers.ops.collective import TensorGroup
from workers.ops.linear import WEIGHT_FORMATS, LinearMethod, linear_from_blocks, make_linear
from workers.ops.narrow import compute_dtype

FORMATS = (*WEIGHT_FORMATS, "gguf")

Cut = tuple[int, Range]  # number of rows, and those that a rank holds


def load_decoder(
    folder: ModelFolder,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention = SDPA,
    weight_format: str = "float32",
    deterministic: bool = False,
    shard: ModelShard | None = None,
    group: TensorGroup | None = None,
) -> Decoder:
    """The folder's model on `device`, in the `compute_dtype` beside KV of `dtype`.

    `shard`: the part to load (None: all); `group`: its tensor ranks, if there are several. Formats with one scale for
    several columns (int8, q4_k) round each shard's columns separately.

    `weight_format` applies to the linear layers; embeddings, norms and routers keep their dtype. "gguf": the blocks of
    the file that the folder was converted from, or float32 where their format has no kernel. `deterministic`: a row's
    bits do not depend on the other rows, provided that `attention` is batch invariant too. Raises `ModelError` if a
    tensor is missing, unknown, has the wrong shape, or holds NaN or infinity.
    """
    if weight_format not in FORMATS:
        raise ModelError(f"weight format {weight_format!r} is not supported; supported: {', '.join(FORMATS)}")
    if weight_format != "float32" and device.type != "cpu":
        raise ModelError(f"weight format {weight_format!r} needs a CPU; on {device} take float32 and set the dtype")
    config = read_model_config(folder.path)
    check_tensors(folder.path, config)
    shard = shard or shard_of(config, ParallelConfig(), 0)
    if (shard.tensor_rank, shard.tensor) != ((group.rank, group.size) if group else (0, 1)):
        raise ValueError(f"tensor rank {shard.tensor_rank} of {shard.tensor} needs the group of these ranks")
    dtype = compute_dtype(device, dtype)
    weights = Weights(folder.path, device, dtype, config=config)
    blocks = GGUFBlocks(folder.path) if weight_format == "gguf" else None
    return _Builder(config, shard, group, weights, blocks, weight_format, deterministic).decoder(attention)


class _Builder:
    """Builds one decoder."""

    def __init__(
        self,
        config: ModelConfig,
        shard: ModelShard,
        group: TensorGroup | None,
        weights: Weights,
        blocks: GGUFBlocks | None,
        weight_format: str,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._shard = shard
        self._group = group
        self._weights = weights
        self._blocks = blocks
        self._weight_format = "float32" if blocks else weight_format  # of weights without blocks
        self._deterministic = deterministic
        self._make = partial(make_linear, deterministic=deterministic)

    def decoder(self, attention: Attention) -> Decoder:
        config, names, shard = self._config, self._config.names, self._shard
        tied = f"{names.root}.embed_tokens.weight"
        head_name = tied if config.tie_embeddings else f"{names.head}.weight"
        embedding = self._weights.take(tied, shard.vocab) if shard.is_first else None
        head = None
        if shard.is_last:
            shared = embedding if config.tie_embeddings else None
            head = self._head(head_name, self._weights.take(head_name, shard.vocab) if shared is None else shared)
        return Decoder(
            shard.part_of(config),
            None if embedding is None else self._embedding(embedding),
            tuple(self._layer(f"{names.root}.layers.{at}", config.layers[at]) for at in range(*shard.layers)),
            self._norm(names.root, "norm") if shard.is_last else None,
            head,
            attention,
        )

    def _embedding(self, weight: Tensor) -> Transform:
        if self._group is None:
            return partial(F.embedding, weight=weight)
        return Reduced(PartialEmbedding(weight, self._shard.vocab[0]), self._group)

    def _head(self, name: str, weight: Tensor) -> LinearMethod | Gathered:
        # As in GGUF files: four bits are too few for logits.
        weight_format = "q8_0" if self._weight_format in ("q4_0", "q4_1", "q4_k") else self._weight_format
        vocab_size, columns = self._config.vocab_size, (0, self._config.hidden_size)
        head = self._method([Part(name, vocab_size, self._shard.vocab)], columns, weight, None, weight_format)
        if self._group is None:
            return head
        borders = [split_units(vocab_size, self._group.size, rank) for rank in range(self._group.size)]
        return Gathered(head, self._group, tuple(end - first for first, end in borders))

    def _layer(self, prefix: str, layer: LayerConfig) -> Layer:
        config, names = self._config, self._config.names
        attention_norm, ffn_norm = self._norm(prefix, names.attention_norm), self._norm(prefix, names.ffn_norm)
        assert attention_norm is not None and ffn_norm is not None
        output_name, features = names.output, value_columns(config, self._shard)
        delta, latent = None, None
        if layer.is_linear:
            rows, delta = load_delta_net(self._weights, f"{prefix}.{names.delta}", config, self._shard, self._make)
            qkv = self._make(rows, None, self._weight_format)
            output_name, (first, end), size = f"{names.delta}.out_proj", self._shard.value_heads, delta.sizes.value_dim
            features = (first * size, end * size)
        else:
            qkv = self._qkv(prefix)
        output: Changeable = Output(self._row_parallel(prefix, output_name, features, config.output_bias))
        if config.latent is not None:
            latent, output = self._latent(prefix, config.latent, output)
        return Layer(
            attention_norm=attention_norm,
            qkv=qkv,
            qk_norm=self._qk_norm(prefix) if delta is None and latent is None else None,
            sinks=self._weights.take(f"{prefix}.{names.sinks}", self._shard.heads) if names.sinks else None,
            delta=delta,
            latent=latent,
            output=self._reduced(output),
            attention_post_norm=self._norm(prefix, names.attention_post_norm),
            ffn_norm=ffn_norm,
            feed_forward=self._reduced(self._experts(prefix) if layer.has_experts else self._dense(prefix)),
            ffn_post_norm=self._norm(prefix, names.ffn_post_norm),
        )

    def _reduced(self, half: Changeable) -> Changeable:
        return half if self._group is None else Reduced(half, self._group)

    def _qkv(self, prefix: str) -> LinearMethod:
        config, cuts = self._config, qkv_cuts(self._config, self._shard)
        if config.output_gate:
            first, end = cuts[0][1]
            rows = ((2 * first, 2 * end), cuts[1][1], cuts[2][1])
            taken = zip(config.names.qkv, rows, strict=True)
            both, keys, values = [self._weights.take(f"{prefix}.{name}.weight", own) for name, own in taken]
            query_rows, gate = both.view(-1, 2, config.head_dim, config.hidden_size).unbind(1)
            weight = torch.cat([query_rows.flatten(0, 1), keys, values, gate.flatten(0, 1)])
            return self._make(weight, None, self._weight_format)
        return self._column_parallel(prefix, config.names.qkv, cuts, config.qkv_bias)

    def _latent(self, prefix: str, sizes: MLAConfig, output: Changeable) -> tuple[Latent, LatentOutput]:
        """What makes query and key of the first projection, and the output of what is attended to."""
        config, names, heads = self._config, self._config.names, self._shard.heads
        key_norm, query_norm, query_up = self._norm(prefix, names.key_norm), None, None
        assert key_norm is not None
        if sizes.q_lora_rank:
            queries = _features(config.num_heads, heads, sizes.qk_head_dim)
            query_norm = self._norm(prefix, names.query_norm)
            query_up = self._column_parallel(prefix, (names.query_up,), (queries,), bias=False)
        _, own = _features(config.num_heads, heads, sizes.qk_nope_head_dim + sizes.v_head_dim)
        up = torch.unflatten(self._weights.take(f"{prefix}.{names.kv_up}.weight", own), 0, (heads[1] - heads[0], -1))
        to_latent = self._of_heads(up[:, : sizes.qk_nope_head_dim].transpose(1, 2))
        from_latent = self._of_heads(up[:, sizes.qk_nope_head_dim :])
        latent = Latent(sizes, query_norm, query_up, key_norm, to_latent)
        return latent, LatentOutput(sizes, from_latent, output)

    def _of_heads(self, weight: Tensor) -> HeadsLinear | BatchedLinear:
        """For weight [heads, out, in]."""
        if weight.is_cuda:
            return BatchedLinear(weight.transpose(1, 2).contiguous())
        return HeadsLinear(tuple(self._make(each.contiguous(), None, self._weight_format) for each in weight))

    def _qk_norm(self, prefix: str) -> Tensor | None:
        """The weights of the norms of q and k, repeated for each head."""
        config, names = self._shard.part_of(self._config), self._config.names
        query, key = (self._norm(prefix, name) for name in (names.query_norm, names.key_norm))
        if query is None or key is None:
            return None
        return torch.stack([query] * config.num_heads + [key] * config.num_kv_heads)

    def _dense(self, prefix: str) -> FeedForward:
        names, config = self._config.names, self._config
        return self._feed_forward(
            prefix, names.gate_up, names.down, (config.ffn_size, self._shard.ffn), config.mlp_bias
        )

    def _experts(self, prefix: str) -> Experts | GroupedExperts:
        names, experts = self._config.names, self._config.experts
        assert experts is not None

        def expert(name: str, gate_up: tuple[str, ...], columns: Cut) -> FeedForward:
            return self._feed_forward(f"{prefix}.{name}", gate_up, names.expert_down, columns, bias=False)

        shared: SharedExpert | FeedForward | None = None
        if experts.shared_ffn_size:
            shared_columns = (experts.shared_ffn_size, self._shard.shared_ffn)
            shared = expert(names.shared_expert, names.shared_gate_up, shared_columns)
            if names.shared_gate:
                shared = SharedExpert(shared, self._make(self._weights.take(f"{prefix}.{names.shared_gate}.weight")))
        columns = (experts.ffn_size, self._shard.expert_ffn)
        bias = self._weights.take(f"{prefix}.{names.router}.bias") if experts.bias else None
        scores = self._make(self._weights.take(f"{prefix}.{names.router}.weight"), bias)
        correction = None
        if names.router_correction:
            correction = self._weights.take(f"{prefix}.{names.router_correction}", dtype=torch.float32)
        router = ExpertRouter(scores, experts, correction)
        if experts.stacked:
            each = [self._stacked_expert(f"{prefix}.{names.experts}", number) for number in range(experts.count)]
        else:
            each = [
                expert(f"{names.experts}.{number}", names.expert_gate_up, columns) for number in range(experts.count)
            ]
        routed = Experts(router, tuple(each), shared)
        return routed if self._deterministic else grouped(routed)

    def _stacked_expert(self, prefix: str, expert: int) -> FeedForward:
        """This rank's columns of one expert whose matrices [in, out] are in tensors of all experts."""
        names, experts, columns = self._config.names, self._config.experts, self._shard.expert_ffn
        assert experts is not None
        interleaved, take = experts.interleaved, partial(self._weights.take, expert=expert)
        gate_up, down = (f"{prefix}.{name}" for name in (names.expert_gate_up[0], names.expert_down))

        def own(rows: Tensor) -> Tensor:
            halves = (rows[::2], rows[1::2]) if interleaved else rows.chunk(2)
            return torch.cat([half[slice(*columns)] for half in halves]).contiguous()

        first_bias = own(take(f"{gate_up}_bias")) if experts.bias else None
        last_bias = take(f"{down}_bias") if experts.bias and self._shard.tensor_rank == 0 else None
        return FeedForward(
            gate_up=self._make(own(take(gate_up).t()), first_bias, self._weight_format),
            down=self._make(take(down, columns).t().contiguous(), last_bias, self._weight_format),
            activation=self._config.activation,
        )

    def _feed_forward(self, prefix: str, gate_up: tuple[str, ...], down: str, columns: Cut, bias: bool) -> FeedForward:
        return FeedForward(
            gate_up=self._column_parallel(prefix, gate_up, (columns, columns), bias),
            down=self._row_parallel(prefix, down, columns[1], bias),
            activation=self._config.activation,
        )

    def _norm(self, prefix: str, name: str) -> Tensor | None:
        """The norm's weight; None for an empty name."""
        if not name:
            return None
        weight = self._weights.take(f"{prefix}.{name}.weight")
        return weight + self._config.norm_offset if self._config.norm_offset else weight

    def _column_parallel(self, prefix: str, names: Sequence[str], cuts: Sequence[Cut], bias: bool) -> LinearMethod:
        """This rank's rows of W [out, hidden], the stacked tensors `names`: its columns of y."""
        weights = stacked([f"{prefix}.{name}.weight" for name in names], cuts)
        biases = stacked([f"{prefix}.{name}.bias" for name in names], cuts) if bias else []
        weight = fuse([self._rows(part) for part in weights])
        offset = fuse([self._rows(part) for part in biases]) if bias else None
        return self._method(weights, (0, weight.shape[1]), weight, offset, self._weight_format)

    def _rows(self, part: Part) -> Tensor:
        module, _, _ = part.name.rpartition(".")
        return turned(self._config, module, self._weights.take(part.name, part.rows))

    def _row_parallel(self, prefix: str, name: str, columns: Range, bias: bool) -> LinearMethod:
        """This rank's columns of W [hidden, in]: a summand of y. The first rank adds the bias."""
        rows = (0, self._config.hidden_size)
        weight = self._weights.take(f"{prefix}.{name}.weight", rows, columns)
        offset = self._weights.take(f"{prefix}.{name}.bias") if bias and self._shard.tensor_rank == 0 else None
        part = Part(f"{prefix}.{name}.weight", rows[1], rows)
        return self._method([part], columns, weight, offset, self._weight_format)

    def _method(
        self, parts: Sequence[Part], columns: Range, weight: Tensor, bias: Tensor | None, weight_format: str
    ) -> LinearMethod:
        """The linear layer for `weight`, which has the parts' columns; from the file's blocks if possible."""
        found = self._blocks.take(parts, columns, weight) if self._blocks else None
        if found is None:
            return self._make(weight, bias, weight_format)
        kind, blocks = found
        return linear_from_blocks(blocks, weight.shape[1], bias, kind)


def turned(config: ModelConfig, module: str, rows: Tensor) -> Tensor:
    """Rows of a linear layer, those that rotate in the order of `rotate`."""
    names, latent = config.names, config.latent
    if not module.endswith(names.neighbors):
        return rows
    if latent is None:
        return halves(rows, config.head_dim, config.head_dim)
    return halves(
        rows, config.head_dim if module.endswith(names.qkv[1]) else latent.qk_head_dim, latent.qk_rope_head_dim
    )


def qkv_cuts(config: ModelConfig, shard: ModelShard) -> tuple[Cut, ...]:
    """A rank's rows of a layer's first projection, in the order of `TensorNames.qkv`."""
    if (latent := config.latent) is not None:
        queries = _features(config.num_heads, shard.heads, latent.qk_head_dim)
        if latent.q_lora_rank:  # all ranks compute the latents
            queries = (latent.q_lora_rank, (0, latent.q_lora_rank))
        return queries, (config.head_dim, (0, config.head_dim))
    kv = _features(config.num_kv_heads, shard.kv_heads, config.head_dim)
    return _features(config.num_heads, shard.heads, config.head_dim), kv, kv


def value_columns(config: ModelConfig, shard: ModelShard) -> Range:
    """A rank's columns of a layer's output projection."""
    return _features(config.num_heads, shard.heads, config.value_dim)[1]


def _features(count: int, heads: Range, head_dim: int) -> Cut:
    return count * head_dim, (heads[0] * head_dim, heads[1] * head_dim)


def stacked(names: Sequence[str], cuts: Sequence[Cut]) -> list[Part]:
    """The rows to load: one cut per tensor, or all cuts of a single fused tensor."""
    if len(names) == len(cuts):
        return [Part(name, height, rows) for name, (height, rows) in zip(names, cuts, strict=True)]
    (name,) = names
    total = sum(height for height, _ in cuts)
    parts: list[Part] = []
    below = 0
    for height, (first, end) in cuts:
        if parts and parts[-1].rows[1] == below + first:  # adjacent rows stay one view
            first = parts.pop().rows[0] - below
        parts.append(Part(name, total, (below + first, below + end)))
        below += height
    return parts
