"""DeepSeek V2 and V3: the fields of their latent attention and experts.

Knows their config.json and tensor names; knows no weights.
"""

from dataclasses import replace

from workers.model.description import ExpertsConfig, MLAConfig, ModelConfig, TensorNames
from workers.model.family_fields import MAX_EXPERTS, MAX_LAYERS, read_plain, with_experts
from workers.model.fields import Fields
from workers.model.rope_fields import read_sharpening

_NAMES = TensorNames(
    query_norm="self_attn.q_a_layernorm",
    key_norm="self_attn.kv_a_layernorm",
    query_up="self_attn.q_b_proj",
    kv_up="self_attn.kv_b_proj",
    shared_expert="mlp.shared_experts",
    shared_gate="",
)


def deepseek2(fields: Fields) -> ModelConfig:
    fields = fields.completed(
        n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407, first_k_dense_replace=0
    )
    fields.only("norm_topk_prob", False)  # transformers ignores it, DeepSeek's own code normalizes and does not scale
    groups = fields.only("topk_method", "greedy", "group_limited_greedy") != "greedy"
    experts = _experts(fields, groups=fields.count("n_group") if groups else 1, scale=1.0)
    return _latent_attention(fields, experts)


def deepseek3(fields: Fields) -> ModelConfig:
    fields = fields.completed(
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        topk_group=4,
    )
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    experts = _experts(fields, groups=fields.count("n_group", 8), scale=2.5)
    if experts.count // experts.groups < 2:
        fields.refuse(f"n_group is {experts.groups} for {experts.count} experts; each group needs two or more")
    experts = replace(experts, sigmoid=True, normalize=fields.flag("norm_topk_prob", True))
    config = _latent_attention(fields, experts, interleaved=fields.flag("rope_interleave", True))
    return replace(config, names=replace(config.names, router_correction="mlp.gate.e_score_correction_bias"))


def _experts(fields: Fields, groups: int, scale: float) -> ExpertsConfig:
    count = fields.count("n_routed_experts", most=MAX_EXPERTS)
    per_token, ffn_size = fields.count("num_experts_per_tok"), fields.count("moe_intermediate_size")
    top_groups = fields.count("topk_group") if groups > 1 else 1
    if count % groups or top_groups > groups or per_token > top_groups * (count // groups):
        fields.refuse(
            f"{per_token} experts of a token cannot come from topk_group {top_groups} of n_group {groups} equal groups "
            f"of {count} experts"
        )
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        ffn_size=ffn_size,
        shared_ffn_size=fields.count("n_shared_experts") * ffn_size,
        scale=fields.number("routed_scaling_factor", scale, above=0),
        groups=groups,
        top_groups=top_groups,
    )


def _latent_attention(fields: Fields, experts: ExpertsConfig, *, interleaved: bool = True) -> ModelConfig:
    """Latent attention, and experts but for the first layers. Layers for multi-token prediction are ignored."""
    heads = fields.count("num_attention_heads")
    for name, supported in {"num_key_value_heads": heads, "attention_bias": False, "moe_layer_freq": 1}.items():
        fields.only(name, supported)
    query_rank = 0 if fields.has("q_lora_rank") and fields.get("q_lora_rank") is None else 1536
    latent = MLAConfig(
        kv_lora_rank=fields.count("kv_lora_rank", 512),
        q_lora_rank=query_rank and fields.count("q_lora_rank", query_rank),
        qk_nope_head_dim=fields.count("qk_nope_head_dim", 128),
        qk_rope_head_dim=fields.count("qk_rope_head_dim", 64),
        v_head_dim=fields.count("v_head_dim", 128),
    )
    # Checkpoints leave head_dim out, or give any of three widths.
    config = read_plain(fields.replaced(head_dim=latent.qk_rope_head_dim, num_key_value_heads=1))
    queries = ("self_attn.q_a_proj" if query_rank else "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa")
    turned = (_NAMES.query_up if query_rank else queries[0], queries[1])
    unused = fields.count("num_nextn_predict_layers", 1, most=MAX_LAYERS, least=0)
    names = replace(
        _NAMES,
        qkv=queries,
        neighbors=turned if interleaved else (),
        foreign=tuple(f"model.layers.{config.num_layers + each}." for each in range(unused)),
    )
    config = replace(
        config,
        head_dim=latent.kv_lora_rank + latent.qk_rope_head_dim,
        attention_scale=latent.qk_head_dim**-0.5 * read_sharpening(fields) ** 2,
        latent=latent,
        names=names,
    )
    dense = fields.count("first_k_dense_replace", least=0)
    return with_experts(config, experts, [layer >= dense for layer in range(config.num_layers)])
