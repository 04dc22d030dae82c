"""Qwen 2, 3, Qwen3-Next and 3.5: their fields and tensor names as a `ModelConfig`.

Knows the fields of their configs; knows no weights. Source: transformers' qwen2, qwen3, qwen3_next and qwen3_5, and
their versions with experts.
"""

from dataclasses import replace

from workers.model.description import ExpertsConfig, LinearAttentionConfig, ModelConfig, TensorNames
from workers.model.family_fields import (
    MAX_EXPERTS,
    in_all_layers,
    read_num_layers,
    read_plain,
    read_window,
    typed_windows,
    with_experts,
)
from workers.model.fields import Fields

_QK_NORMS = TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_QWEN3_NEXT = replace(_QK_NORMS, delta_parts=("in_proj_qkvz", "in_proj_ba"), foreign=("mtp.",))
_QWEN3_5 = replace(_QWEN3_NEXT, delta_parts=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))


def qwen2(fields: Fields) -> ModelConfig:
    return replace(read_plain(fields, _upper_windows(fields)), qkv_bias=True)


def qwen3(fields: Fields) -> ModelConfig:
    return read_plain(fields, _upper_windows(fields), head_dim=128, names=_QK_NORMS)


def qwen2_moe(fields: Fields) -> ModelConfig:
    fields.only("use_sliding_window", False)
    config = replace(read_plain(fields), qkv_bias=fields.flag("qkv_bias", True))
    return with_experts(config, _qwen_experts(fields, 60, 4, shared=5632), _sparse_layers(fields))


def qwen3_moe(fields: Fields) -> ModelConfig:
    window = read_window(fields, absent=4096) if fields.flag("use_sliding_window", False) else 0
    config = read_plain(fields, in_all_layers(fields, window), names=_QK_NORMS)
    return with_experts(config, _qwen_experts(fields, 128, 8), _sparse_layers(fields))


def qwen3_next(fields: Fields) -> ModelConfig:
    fields = fields.completed(intermediate_size=5632, norm_topk_prob=True, moe_intermediate_size=512)
    config = _hybrid(fields, _QWEN3_NEXT, key_value_heads=2)
    return with_experts(config, _qwen_experts(fields, 512, 10, shared=512), _sparse_layers(fields))


def qwen3_5(fields: Fields) -> ModelConfig:
    return _hybrid(fields, _QWEN3_5, key_value_heads=4)


def qwen3_5_moe(fields: Fields) -> ModelConfig:
    fields = fields.completed(intermediate_size=512, moe_intermediate_size=512, norm_topk_prob=True)
    config = _hybrid(fields, _QWEN3_5, key_value_heads=2)
    return with_experts(config, _qwen_experts(fields, 256, 8, shared=512), [True] * config.num_layers)


def _hybrid(fields: Fields, names: TensorNames, key_value_heads: int) -> ModelConfig:
    """Qwen's models with linear attention: by default all layers but each fourth have it."""
    fields = fields.completed(num_key_value_heads=key_value_heads, partial_rotary_factor=0.25)
    fields.only("attention_bias", False)
    fields.only("attn_output_gate", True)
    interval = fields.count("full_attention_interval", 4)
    types = fields.items("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(read_num_layers(fields))
    ]
    linear_types = typed_windows(fields, types, 1, "linear_attention")
    config = read_plain(fields, head_dim=256, names=names, partial_rotary=True)
    linear = LinearAttentionConfig(
        key_heads=fields.count("linear_num_key_heads", 16),
        value_heads=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
        kernel=fields.count("linear_conv_kernel_dim", 4),
        grouped=len(names.delta_parts) == 2,
    )
    if linear.key_heads % config.num_kv_heads or linear.value_heads % linear.key_heads:
        fields.refuse(
            f"{linear.value_heads} value heads and {linear.key_heads} key heads of linear attention are not shared by "
            f"{config.num_kv_heads} KV heads: each number must be a multiple of the next"
        )
    layers = [
        replace(layer, rope=None, is_linear=True) if is_linear else layer
        for layer, is_linear in zip(config.layers, linear_types, strict=True)
    ]
    if all(linear_types):
        fields.refuse("no layer has full attention; at least one is needed")
    return replace(config, layers=tuple(layers), linear=linear, output_gate=True, norm_offset=1.0)


def _upper_windows(fields: Fields) -> list[int]:
    """Qwen: layers from `max_window_layers` on have a window, if any has."""
    if not fields.flag("use_sliding_window", False):
        return in_all_layers(fields, 0)
    full = fields.number("max_window_layers", 28)
    types = ["full_attention" if layer < full else "sliding_attention" for layer in range(read_num_layers(fields))]
    return typed_windows(fields, types, read_window(fields, absent=4096))


def _qwen_experts(fields: Fields, count: int, per_token: int, shared: int = 0) -> ExpertsConfig:
    """`shared`: the width of the shared expert, if the family has one."""
    return ExpertsConfig(
        count=fields.count("num_experts", fields.count("num_local_experts", count), most=MAX_EXPERTS),
        per_token=fields.count("num_experts_per_tok", per_token),
        ffn_size=fields.count("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", False),
        shared_ffn_size=fields.count("shared_expert_intermediate_size", shared) if shared else 0,
    )


def _sparse_layers(fields: Fields) -> list[bool]:
    """Qwen: every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.items("mlp_only_layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(read_num_layers(fields))]
