"""The model families: translates each family's config fields and tensor names into a `ModelConfig`.

Knows architectures by name; knows no weights. Defaults are those of the families' own config classes, since
checkpoints may omit them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from workers.model.deepseek import deepseek2, deepseek3
from workers.model.description import (
    CLAMPED_SILU,
    GELU_TANH,
    ExpertsConfig,
    LinearAttentionConfig,
    ModelConfig,
    RopeConfig,
    Temperature,
    TensorNames,
)
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
from workers.model.rope_fields import read_rope

_QK_NORMS = TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_GEMMA2 = TensorNames(
    attention_post_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)
_GEMMA3 = replace(_GEMMA2, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_GEMMA3_AND_VISION = replace(
    _GEMMA3,
    root="language_model.model",
    head="language_model.lm_head",
    foreign=("vision_tower.", "multi_modal_projector."),
)
_PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_MIXTRAL = TensorNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
_GPT_OSS = TensorNames(router="mlp.router", expert_gate_up=("gate_up_proj",), sinks="self_attn.sinks")
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_QWEN3_NEXT = replace(_QK_NORMS, delta_parts=("in_proj_qkvz", "in_proj_ba"), foreign=("mtp.",))
_QWEN3_5 = replace(_QWEN3_NEXT, delta_parts=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_QWEN3_5_AND_VISION = replace(_QWEN3_5, root="model.language_model", head="lm_head", foreign=("mtp.", "model.visual."))
_LLAMA4 = TensorNames(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    experts="feed_forward.experts",
    expert_gate_up=("gate_up_proj",),
    shared_expert="feed_forward.shared_expert",
    shared_gate="",
    neighbors=("self_attn.q_proj", "self_attn.k_proj"),
)
_LLAMA4_AND_VISION = replace(
    _LLAMA4,
    root="language_model.model",
    head="language_model.lm_head",
    foreign=("vision_model.", "multi_modal_projector."),
)


def describe(fields: Fields) -> ModelConfig:
    """The model of a config.json. Raises `ModelError` naming the invalid field or the unknown architecture."""
    names = fields.items("architectures")
    name = str(names[0]) if names else "unnamed"
    if name not in FAMILIES:
        fields.refuse(f"architecture {name} is unknown; known are {', '.join(FAMILIES)}")
    return replace(FAMILIES[name](fields), architecture=name)


def _llama(fields: Fields) -> ModelConfig:
    fields.only("sliding_window", None)
    return read_plain(fields)


def _mistral(fields: Fields) -> ModelConfig:
    """A window in all layers or none; `layer_types` must agree if present."""
    window = read_window(fields, absent=4096)
    everywhere = in_all_layers(fields, window)
    kind = "sliding_attention" if window else "full_attention"
    if typed_windows(fields, [kind] * len(everywhere), window) != everywhere:
        fields.refuse(
            f"layer_types is not {kind} for every layer, but sliding_window is {window or None}, which applies to "
            "all layers of a Mistral; make them agree"
        )
    return read_plain(fields, everywhere)


def _mixtral(fields: Fields) -> ModelConfig:
    config = read_plain(fields, in_all_layers(fields, read_window(fields)), rms_eps=1e-5, names=_MIXTRAL)
    experts = ExpertsConfig(
        count=fields.count("num_local_experts", 8, most=MAX_EXPERTS),
        per_token=fields.count("num_experts_per_tok", 2),
        ffn_size=config.ffn_size,
        normalise=True,
    )
    return with_experts(config, experts, [True] * config.num_layers)


def _qwen2(fields: Fields) -> ModelConfig:
    return replace(read_plain(fields, _upper_windows(fields)), qkv_bias=True)


def _qwen3(fields: Fields) -> ModelConfig:
    return read_plain(fields, _upper_windows(fields), head_dim=128, names=_QK_NORMS)


def _qwen2_moe(fields: Fields) -> ModelConfig:
    fields.only("use_sliding_window", False)
    config = replace(read_plain(fields), qkv_bias=fields.flag("qkv_bias", True))
    shared = fields.count("shared_expert_intermediate_size", 5632)
    return with_experts(config, replace(_qwen_experts(fields, 60, 4), shared_ffn_size=shared), _sparse_layers(fields))


def _qwen3_moe(fields: Fields) -> ModelConfig:
    window = read_window(fields, absent=4096) if fields.flag("use_sliding_window", False) else 0
    config = read_plain(fields, in_all_layers(fields, window), names=_QK_NORMS)
    return with_experts(config, _qwen_experts(fields, 128, 8), _sparse_layers(fields))


def _qwen3_next(fields: Fields) -> ModelConfig:
    fields = fields.completed(intermediate_size=5632, norm_topk_prob=True, moe_intermediate_size=512)
    config = _hybrid(fields, _QWEN3_NEXT, key_value_heads=2)
    shared = fields.count("shared_expert_intermediate_size", 512)
    experts = replace(_qwen_experts(fields, 512, 10), shared_ffn_size=shared)
    return with_experts(config, experts, _sparse_layers(fields))


def _qwen3_5(fields: Fields, names: TensorNames = _QWEN3_5) -> ModelConfig:
    return _hybrid(fields, names, key_value_heads=4)


def _qwen3_5_moe(fields: Fields, names: TensorNames = _QWEN3_5) -> ModelConfig:
    fields = fields.completed(intermediate_size=512, moe_intermediate_size=512, norm_topk_prob=True)
    config = _hybrid(fields, names, key_value_heads=2)
    shared = fields.count("shared_expert_intermediate_size", 512)
    experts = replace(_qwen_experts(fields, 256, 8), shared_ffn_size=shared)
    return with_experts(config, experts, [True] * config.num_layers)


def _qwen3_5_and_vision(fields: Fields) -> ModelConfig:
    """The text model of the multimodal Qwen3.5."""
    return _qwen3_5(_qwen3_5_text(fields), _QWEN3_5_AND_VISION)


def _qwen3_5_moe_and_vision(fields: Fields) -> ModelConfig:
    return _qwen3_5_moe(_qwen3_5_text(fields), _QWEN3_5_AND_VISION)


def _qwen3_5_text(fields: Fields) -> Fields:
    return fields.inner("text_config", tie_word_embeddings=fields.get("tie_word_embeddings"))


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


def _gemma2(fields: Fields) -> ModelConfig:
    return _gemma(fields, names=_GEMMA2, global_every=2, attention_softcap=50.0, logit_softcap=30.0)


def _gemma3(fields: Fields) -> ModelConfig:
    config = _gemma(fields, names=_GEMMA3, global_every=fields.count("sliding_window_pattern", 6))
    if fields.inner("rope_parameters").has("sliding_attention"):
        local = read_rope(fields, config.head_dim, config.context_length, "sliding_attention")
        everywhere = read_rope(fields, config.head_dim, config.context_length, "full_attention")
    else:  # the first format: local layers are unscaled
        everywhere = read_rope(fields, config.head_dim, config.context_length, theta=1e6)
        local = RopeConfig(fields.number("rope_local_base_freq", 1e4, above=1), everywhere.rotary_dim)
    layers = tuple(replace(layer, rope=local if layer.window else everywhere) for layer in config.layers)
    return replace(config, layers=layers)


def _gemma3_and_vision(fields: Fields) -> ModelConfig:
    """The text model of the multimodal Gemma 3. Their configs omit what equals the 4B's."""
    text = fields.inner(
        "text_config",
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=262_208,
        max_position_embeddings=131_072,
    )
    return replace(_gemma3(text), names=_GEMMA3_AND_VISION)


def _gemma(
    fields: Fields,
    names: TensorNames,
    global_every: int,
    attention_softcap: float | None = None,
    logit_softcap: float | None = None,
) -> ModelConfig:
    types = [
        "sliding_attention" if (layer + 1) % global_every else "full_attention"
        for layer in range(read_num_layers(fields))
    ]
    windows = typed_windows(fields, types, fields.count("sliding_window", 4096))
    config = read_plain(fields, windows, head_dim=256, tied=True, activation=GELU_TANH, names=names)
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", attention_softcap),
        logit_softcap=_softcap(fields, "final_logit_softcapping", logit_softcap),
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
    )


def _phi3(fields: Fields) -> ModelConfig:
    return read_plain(
        fields, in_all_layers(fields, read_window(fields)), rms_eps=1e-5, names=_PHI3, partial_rotary=True
    )


def _gpt_oss(fields: Fields) -> ModelConfig:
    fields = fields.completed(
        head_dim=64,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        sliding_window=128,
        rope_theta=150_000.0,
        rope_scaling=_GPT_OSS_YARN,
        attention_bias=True,
    )
    fields.only("swiglu_alpha", 1.702)
    fields.only("swiglu_limit", 7.0)
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(read_num_layers(fields))]
    windows = typed_windows(fields, types, fields.count("sliding_window"))
    config = replace(read_plain(fields, windows, rms_eps=1e-5, names=_GPT_OSS), activation=CLAMPED_SILU)
    experts = ExpertsConfig(
        count=fields.count("num_local_experts", 128, most=MAX_EXPERTS),
        per_token=fields.count("num_experts_per_tok", 4),
        ffn_size=config.ffn_size,
        normalise=True,
        bias=True,
        stacked=True,
        interleaved=True,
        mxfp4=fields.inner("quantization_config").get("quant_method") == "mxfp4",
    )
    if experts.mxfp4 and (config.hidden_size % 32 or config.ffn_size % 32):
        sizes = f"hidden_size is {config.hidden_size}, intermediate_size {config.ffn_size}"
        fields.refuse(f"MXFP4 needs multiples of 32, but {sizes}")
    return with_experts(config, experts, [True] * config.num_layers)


def _smollm3(fields: Fields) -> ModelConfig:
    fields.only("use_sliding_window", False)
    return _with_turns(read_plain(fields, tied=True), _turns(fields))


def _llama4(fields: Fields) -> ModelConfig:
    """Layers that rotate have chunked attention, and the others a temperature, unless `layer_types` says otherwise."""
    fields = fields.completed(
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        intermediate_size_mlp=16_384,
    )
    if fields.has("attention_chunk_size") and fields.get("attention_chunk_size") is None:
        fields.refuse("attention_chunk_size is null; it must be a number of tokens")
    turns, chunk = _turns(fields), fields.count("attention_chunk_size", 8192)
    types = ["chunked_attention" if turn else "full_attention" for turn in turns]
    windows = typed_windows(fields, types, -chunk, "chunked_attention")
    config = read_plain(fields, windows, rms_eps=1e-5, names=_LLAMA4)
    temperature = None
    if fields.get("attn_temperature_tuning", True):  # a number in early checkpoints
        temperature = Temperature(fields.count("floor_scale", 8192), fields.number("attn_scale", 0.1))
    experts = ExpertsConfig(
        count=fields.count("num_local_experts", 16, most=MAX_EXPERTS),
        per_token=fields.count("num_experts_per_tok", 1),
        ffn_size=config.ffn_size,
        normalise=False,
        shared_ffn_size=config.ffn_size,
        sigmoid=True,
        scales_input=True,
        stacked=True,
    )
    config = replace(
        config,
        ffn_size=fields.count("intermediate_size_mlp"),
        rotated_norm=fields.flag("use_qk_norm", True),
        temperature=temperature,
    )
    step = fields.count("interleave_moe_layer_step", 1)
    sparse = (
        range(step - 1, config.num_layers, step) if fields.get("moe_layers") is None else fields.items("moe_layers")
    )
    config = with_experts(config, experts, [layer in sparse for layer in range(config.num_layers)])
    return _with_turns(config, turns)


def _llama4_and_vision(fields: Fields) -> ModelConfig:
    """The text model of the multimodal Llama 4."""
    return replace(_llama4(fields.inner("text_config")), names=_LLAMA4_AND_VISION)


def _turns(fields: Fields) -> list[Any]:
    """For each layer a true value if it has rotary embedding."""
    interval, num_layers = fields.count("no_rope_layer_interval", 4), read_num_layers(fields)
    turns = fields.items("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if len(turns) != num_layers:
        fields.refuse(f"no_rope_layers has {len(turns)} entries for {num_layers} layers")
    return turns


def _with_turns(config: ModelConfig, turns: Sequence[Any]) -> ModelConfig:
    layers = zip(config.layers, turns, strict=True)
    return replace(config, layers=tuple(layer if turn else replace(layer, rope=None) for layer, turn in layers))


def _upper_windows(fields: Fields) -> list[int]:
    """Qwen: layers from `max_window_layers` on have a window, if any has."""
    if not fields.flag("use_sliding_window", False):
        return in_all_layers(fields, 0)
    full = fields.number("max_window_layers", 28)
    types = ["full_attention" if layer < full else "sliding_attention" for layer in range(read_num_layers(fields))]
    return typed_windows(fields, types, read_window(fields, absent=4096))


def _softcap(fields: Fields, name: str, absent: float | None) -> float:
    """The cap, 0 for none; `absent` is the value for a config without the field."""
    return fields.number(name, 0.0) if fields.has(name) else absent or 0.0


def _qwen_experts(fields: Fields, count: int, per_token: int) -> ExpertsConfig:
    return ExpertsConfig(
        count=fields.count("num_experts", fields.count("num_local_experts", count), most=MAX_EXPERTS),
        per_token=fields.count("num_experts_per_tok", per_token),
        ffn_size=fields.count("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob", False),
    )


def _sparse_layers(fields: Fields) -> list[bool]:
    """Qwen: every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.items("mlp_only_layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(read_num_layers(fields))]


FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5_and_vision,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe_and_vision,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_and_vision,
    "Phi3ForCausalLM": _phi3,
    "SmolLM3ForCausalLM": _smollm3,
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4_and_vision,
    "DeepseekV2ForCausalLM": deepseek2,
    "DeepseekV3ForCausalLM": deepseek3,
}
