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
from workers.model.qwen import qwen2, qwen2_moe, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next
from workers.model.rope_fields import read_rope

_GEMMA2 = TensorNames(
    attention_post_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)
_GEMMA3 = replace(_GEMMA2, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_MIXTRAL = TensorNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
_GPT_OSS = TensorNames(router="mlp.router", expert_gate_up=("gate_up_proj",), sinks="self_attn.sinks")
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
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


# Of the text model in a multimodal checkpoint: root, head, and what is ignored.
_TEXT, _PROJECTOR = ("language_model.model", "language_model.lm_head"), "multi_modal_projector."
_QWEN3_5_TEXT = "model.language_model", "lm_head", ("mtp.", "model.visual."), ("tie_word_embeddings",)
# Multimodal Gemma 3 configs omit what equals the 4B's.
_GEMMA3_4B: dict[str, Any] = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
    **{"vocab_size": 262_208, "max_position_embeddings": 131_072},
}


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
    experts = _local_experts(fields, 8, 2, config.ffn_size, normalize=True)
    return with_experts(config, experts, [True] * config.num_layers)


def _local_experts(fields: Fields, count: int, per_token: int, ffn_size: int, **features: bool) -> ExpertsConfig:
    """`count` and `per_token`: the family's defaults."""
    count = fields.count("num_local_experts", count, most=MAX_EXPERTS)
    return ExpertsConfig(count, fields.count("num_experts_per_tok", per_token), ffn_size, **features)


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
    experts = _local_experts(fields, 128, 4, config.ffn_size, normalize=True, bias=True, stacked=True, interleaved=True)
    experts = replace(experts, mxfp4=fields.inner("quantization_config").get("quant_method") == "mxfp4")
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
    experts = _local_experts(fields, 16, 1, config.ffn_size, sigmoid=True, scales_input=True, stacked=True)
    experts = replace(experts, shared_ffn_size=config.ffn_size)
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


def _softcap(fields: Fields, name: str, absent: float | None) -> float:
    """The cap, 0 for none; `absent` is the value for a config without the field."""
    return fields.number(name, 0.0) if fields.has(name) else absent or 0.0


def _text_of(
    read: Callable[[Fields], ModelConfig],
    root: str,
    head: str,
    foreign: tuple[str, ...],
    outer: tuple[str, ...] = (),
    **absent: Any,
) -> Callable[[Fields], ModelConfig]:
    """The text model of a multimodal one. What its config omits is `absent`, or in the whole one (`outer`)."""

    def read_text(fields: Fields) -> ModelConfig:
        config = read(fields.inner("text_config", **absent, **{name: fields.get(name) for name in outer}))
        return replace(config, names=replace(config.names, root=root, head=head, foreign=foreign))

    return read_text


FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": _text_of(qwen3_5, *_QWEN3_5_TEXT),
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _text_of(qwen3_5_moe, *_QWEN3_5_TEXT),
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _text_of(_gemma3, *_TEXT, ("vision_tower.", _PROJECTOR), **_GEMMA3_4B),
    "Phi3ForCausalLM": _phi3,
    "SmolLM3ForCausalLM": _smollm3,
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _text_of(_llama4, *_TEXT, ("vision_model.", _PROJECTOR)),
    "DeepseekV2ForCausalLM": deepseek2,
    "DeepseekV3ForCausalLM": deepseek3,
}
