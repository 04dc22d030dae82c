"""The tensors that a model needs, by their names in the checkpoint, with their shapes.

Knows names and sizes; knows no file and no torch.
"""

import re
from collections.abc import Iterator

from workers.model.description import ExpertsConfig, LayerConfig, MLAConfig, ModelConfig

Shapes = dict[str, tuple[int, ...]]
FP8_BLOCK = 128  # rows, and columns, of a float8 matrix that share a scale
FP8_SCALES = "_scale_inv"  # after the matrix's name

# Constants that old checkpoints include.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Every tensor to load, with its shape. Parts that are fused at load are listed together."""
    names, hidden = config.names, config.hidden_size
    shapes: Shapes = {
        f"{names.root}.embed_tokens.weight": (config.vocab_size, hidden),
        f"{names.root}.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, hidden)
    for index, layer in enumerate(config.layers):
        prefix = f"{names.root}.layers.{index}"
        shapes |= {f"{prefix}.{name}": shape for name, shape in _layer(config, layer)}
    return shapes


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether an unknown tensor can be ignored: a constant, a copy, or part of an ignored component."""
    copy_of_embedding = config.tie_embeddings and name == f"{config.names.head}.weight"
    foreign = bool(config.names.foreign) and name.startswith(config.names.foreign)
    return copy_of_embedding or foreign or _IGNORED.search(name) is not None


def _layer(config: ModelConfig, layer: LayerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    names, hidden, head_dim = config.names, config.hidden_size, config.head_dim
    query, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    yield from _norms(hidden, names.attention_norm)
    if layer.is_linear:
        yield from _delta(config)
    else:
        if config.latent is not None:
            yield from _latent(config, config.latent)
        else:
            gated = query * (1 + config.output_gate)
            yield from _linear(names.qkv, (gated, kv, kv), hidden, config.qkv_bias)
            yield from _norms(head_dim, names.query_norm, names.key_norm)
        if names.sinks:
            yield names.sinks, (config.num_heads,)
        yield from _linear((names.output,), (hidden,), config.num_heads * config.value_dim, config.output_bias)
    yield from _norms(hidden, names.attention_post_norm, names.ffn_norm)
    if layer.has_experts:
        yield from _experts(config)
    else:
        yield from _linear(names.gate_up, (config.ffn_size, config.ffn_size), hidden, config.mlp_bias)
        yield from _linear((names.down,), (hidden,), config.ffn_size, config.mlp_bias)
    yield from _norms(hidden, names.ffn_post_norm)


def _delta(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Linear attention."""
    names, hidden, linear = config.names, config.hidden_size, config.linear
    assert linear is not None
    key, value = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    rows: tuple[int, ...] = (2 * key + 2 * value, 2 * linear.value_heads)
    if not linear.grouped:
        rows = (2 * key + value, value, linear.value_heads, linear.value_heads)
    yield from _linear(tuple(f"{names.delta}.{part}" for part in names.delta_parts), rows, hidden, bias=False)
    yield f"{names.delta}.conv1d.weight", (2 * key + value, 1, linear.kernel)
    yield f"{names.delta}.A_log", (linear.value_heads,)
    yield f"{names.delta}.dt_bias", (linear.value_heads,)
    yield f"{names.delta}.norm.weight", (linear.value_dim,)
    yield from _linear((f"{names.delta}.out_proj",), (hidden,), value, bias=False)


def _latent(config: ModelConfig, sizes: MLAConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    names, queries = config.names, config.num_heads * sizes.qk_head_dim
    yield from _linear(names.qkv, (sizes.q_lora_rank or queries, config.head_dim), config.hidden_size, bias=False)
    if sizes.q_lora_rank:
        yield from _norms(sizes.q_lora_rank, names.query_norm)
        yield from _linear((names.query_up,), (queries,), sizes.q_lora_rank, bias=False)
    yield from _norms(sizes.kv_lora_rank, names.key_norm)
    up = config.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    yield from _linear((names.kv_up,), (up,), sizes.kv_lora_rank, bias=False)


def _experts(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    names, hidden, experts = config.names, config.hidden_size, config.experts
    assert experts is not None
    yield from _linear((names.router,), (experts.count,), hidden, experts.bias)
    if names.router_correction:
        yield names.router_correction, (experts.count,)
    parts = [(f"{names.experts}.{expert}", names.expert_gate_up, experts.ffn_size) for expert in range(experts.count)]
    if experts.stacked:
        parts = []
        yield from _stacked(experts, f"{names.experts}.{names.expert_gate_up[0]}", hidden, 2 * experts.ffn_size)
        yield from _stacked(experts, f"{names.experts}.{names.expert_down}", experts.ffn_size, hidden)
    if experts.shared_ffn_size:
        if names.shared_gate:
            yield f"{names.shared_gate}.weight", (1, hidden)
        parts.append((names.shared_expert, names.shared_gate_up, experts.shared_ffn_size))
    for name, gate_up, size in parts:
        yield from _linear(tuple(f"{name}.{part}" for part in gate_up), (size, size), hidden, bias=False)
        yield from _linear((f"{name}.{names.expert_down}",), (hidden,), size, bias=False)


def _stacked(experts: ExpertsConfig, name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One matrix of all experts."""
    if experts.mxfp4:
        yield f"{name}_blocks", (experts.count, columns, rows // 32, 16)
        yield f"{name}_scales", (experts.count, columns, rows // 32)
    else:
        yield name, (experts.count, rows, columns)
    if experts.bias:
        yield f"{name}_bias", (experts.count, columns)


def _norms(size: int, *names: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those norms that the family has."""
    for name in names:
        if name:
            yield f"{name}.weight", (size,)


def _linear(
    names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parts of a linear layer, separate or stacked under a single name."""
    rows = rows if len(names) == len(rows) else (sum(rows),)
    for name, height in zip(names, rows, strict=True):
        yield f"{name}.weight", (height, columns)
    for name, height in zip(names, rows, strict=True):
        if bias:
            yield f"{name}.bias", (height,)
