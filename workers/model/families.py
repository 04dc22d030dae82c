"""The model families: translates each family's config fields and tensor names into a `ModelConfig`.

Knows architectures by name; knows no weights. Defaults are those of the families' own config classes, since
checkpoints may omit them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from workers.model.description import (
    CLAMPED_SILU,
    GELU_TANH,
    SILU,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    LinearAttentionConfig,
    ModelConfig,
    RopeConfig,
    Temperature,
    TensorNames,
)
from workers.model.fields import Fields
from workers.model.rope_fields import read_rope, read_sharpening

# More than any model has: refuses a damaged number before it allocates lists of that length.
_MAX_LAYERS = 4096
_MAX_EXPERTS = 4096

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


_DEEPSEEK = TensorNames(
    query_norm="self_attn.q_a_layernorm",
    key_norm="self_attn.kv_a_layernorm",
    query_up="self_attn.q_b_proj",
    kv_up="self_attn.kv_b_proj",
    shared_expert="mlp.shared_experts",
    shared_gate="",
)


def describe(fields: Fields) -> ModelConfig:
    """The model of a config.json. Raises `ModelError` naming the invalid field or the unknown architecture."""
    names = fields.items("architectures")
    name = str(names[0]) if names else "unnamed"
    if name not in FAMILIES:
        fields.refuse(f"architecture {name} is unknown; known are {', '.join(FAMILIES)}")
    return replace(FAMILIES[name](fields), architecture=name)


def _plain(
    fields: Fields,
    windows: Sequence[int] | None = None,
    *,
    head_dim: int | None = None,
    rms_eps: float = 1e-6,
    tied: bool = False,
    activation: str = SILU,
    names: TensorNames | None = None,
    partial_rotary: bool = False,
) -> ModelConfig:
    """What all families share. `windows` has one number per layer; other arguments are the family's defaults."""
    num_layers = _num_layers(fields)
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    if not head_dim and not fields.get("head_dim") and hidden_size % num_heads:
        fields.refuse(f"hidden_size {hidden_size} is not a multiple of {num_heads} heads; set head_dim")
    head_dim = fields.count("head_dim", head_dim or hidden_size // num_heads)
    context_length = fields.count("max_position_embeddings", 2048)
    fields.only("hidden_activation" if fields.has("hidden_activation") else "hidden_act", activation)
    fields.only("use_bidirectional_attention", False)
    rope = read_rope(fields, head_dim, context_length, "full_attention", partial_rotary=partial_rotary)
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture="",
        hidden_size=hidden_size,
        ffn_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        context_length=context_length,
        layers=tuple(LayerConfig(rope, window) for window in windows or [0] * num_layers),
        rms_eps=fields.number("rms_norm_eps", rms_eps, above=0),
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        eos_token_ids=(),
        dtype="",
        attention_scale=head_dim**-0.5,
        activation=activation,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        names=names or TensorNames(),
    )


def _llama(fields: Fields) -> ModelConfig:
    fields.only("sliding_window", None)
    return _plain(fields)


def _mistral(fields: Fields) -> ModelConfig:
    """A window in all layers or none; `layer_types` must agree if present."""
    window = _window(fields, absent=4096)
    everywhere = _everywhere(fields, window)
    kind = "sliding_attention" if window else "full_attention"
    if _typed_windows(fields, [kind] * len(everywhere), window) != everywhere:
        fields.refuse(
            f"layer_types is not {kind} for every layer, but sliding_window is {window or None}, which applies to "
            "all layers of a Mistral; make them agree"
        )
    return _plain(fields, everywhere)


def _mixtral(fields: Fields) -> ModelConfig:
    config = _plain(fields, _everywhere(fields, _window(fields)), rms_eps=1e-5, names=_MIXTRAL)
    experts = ExpertsConfig(
        count=fields.count("num_local_experts", 8, most=_MAX_EXPERTS),
        per_token=fields.count("num_experts_per_tok", 2),
        ffn_size=config.ffn_size,
        normalise=True,
    )
    return _with_experts(config, experts, [True] * config.num_layers)


def _qwen2(fields: Fields) -> ModelConfig:
    return replace(_plain(fields, _upper_windows(fields)), qkv_bias=True)


def _qwen3(fields: Fields) -> ModelConfig:
    return _plain(fields, _upper_windows(fields), head_dim=128, names=_QK_NORMS)


def _qwen2_moe(fields: Fields) -> ModelConfig:
    fields.only("use_sliding_window", False)
    config = replace(_plain(fields), qkv_bias=fields.flag("qkv_bias", True))
    shared = fields.count("shared_expert_intermediate_size", 5632)
    return _with_experts(config, replace(_qwen_experts(fields, 60, 4), shared_ffn_size=shared), _sparse_layers(fields))


def _qwen3_moe(fields: Fields) -> ModelConfig:
    window = _window(fields, absent=4096) if fields.flag("use_sliding_window", False) else 0
    config = _plain(fields, _everywhere(fields, window), names=_QK_NORMS)
    return _with_experts(config, _qwen_experts(fields, 128, 8), _sparse_layers(fields))


def _qwen3_next(fields: Fields) -> ModelConfig:
    fields = fields.completed(intermediate_size=5632, norm_topk_prob=True, moe_intermediate_size=512)
    config = _hybrid(fields, _QWEN3_NEXT, key_value_heads=2)
    shared = fields.count("shared_expert_intermediate_size", 512)
    experts = replace(_qwen_experts(fields, 512, 10), shared_ffn_size=shared)
    return _with_experts(config, experts, _sparse_layers(fields))


def _qwen3_5(fields: Fields, names: TensorNames = _QWEN3_5) -> ModelConfig:
    return _hybrid(fields, names, key_value_heads=4)


def _qwen3_5_moe(fields: Fields, names: TensorNames = _QWEN3_5) -> ModelConfig:
    fields = fields.completed(intermediate_size=512, moe_intermediate_size=512, norm_topk_prob=True)
    config = _hybrid(fields, names, key_value_heads=2)
    shared = fields.count("shared_expert_intermediate_size", 512)
    experts = replace(_qwen_experts(fields, 256, 8), shared_ffn_size=shared)
    return _with_experts(config, experts, [True] * config.num_layers)


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
    interval = fields.count("full_attention_interval", 4)
    types = fields.items("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(_num_layers(fields))
    ]
    linear_types = _typed_windows(fields, types, 1, "linear_attention")
    config = _plain(fields, head_dim=256, names=names, partial_rotary=True)
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
        "sliding_attention" if (layer + 1) % global_every else "full_attention" for layer in range(_num_layers(fields))
    ]
    windows = _typed_windows(fields, types, fields.count("sliding_window", 4096))
    config = _plain(fields, windows, head_dim=256, tied=True, activation=GELU_TANH, names=names)
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", attention_softcap),
        logit_softcap=_softcap(fields, "final_logit_softcapping", logit_softcap),
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
    )


def _phi3(fields: Fields) -> ModelConfig:
    return _plain(fields, _everywhere(fields, _window(fields)), rms_eps=1e-5, names=_PHI3, partial_rotary=True)


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
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(_num_layers(fields))]
    windows = _typed_windows(fields, types, fields.count("sliding_window"))
    config = replace(_plain(fields, windows, rms_eps=1e-5, names=_GPT_OSS), activation=CLAMPED_SILU)
    experts = ExpertsConfig(
        count=fields.count("num_local_experts", 128, most=_MAX_EXPERTS),
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
    return _with_experts(config, experts, [True] * config.num_layers)


def _smollm3(fields: Fields) -> ModelConfig:
    fields.only("use_sliding_window", False)
    return _with_turns(_plain(fields, tied=True), _turns(fields))


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
    windows = _typed_windows(fields, types, -chunk, "chunked_attention")
    config = _plain(fields, windows, rms_eps=1e-5, names=_LLAMA4)
    temperature = None
    if fields.get("attn_temperature_tuning", True):  # a number in early checkpoints
        temperature = Temperature(fields.count("floor_scale", 8192), fields.number("attn_scale", 0.1))
    experts = ExpertsConfig(
        count=fields.count("num_local_experts", 16, most=_MAX_EXPERTS),
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
    config = _with_experts(config, experts, [layer in sparse for layer in range(config.num_layers)])
    return _with_turns(config, turns)


def _llama4_and_vision(fields: Fields) -> ModelConfig:
    """The text model of the multimodal Llama 4."""
    return replace(_llama4(fields.inner("text_config")), names=_LLAMA4_AND_VISION)


def _deepseek2(fields: Fields) -> ModelConfig:
    fields = fields.completed(
        n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407, first_k_dense_replace=0
    )
    fields.only("norm_topk_prob", False)  # transformers ignores it, DeepSeek's own code normalizes and does not scale
    groups = fields.only("topk_method", "greedy", "group_limited_greedy") != "greedy"
    experts = _deepseek_experts(fields, groups=fields.count("n_group") if groups else 1, scale=1.0)
    return _latent_attention(fields, experts)


def _deepseek3(fields: Fields) -> ModelConfig:
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
    experts = _deepseek_experts(fields, groups=fields.count("n_group", 8), scale=2.5)
    if experts.count // experts.groups < 2:
        fields.refuse(f"n_group is {experts.groups} for {experts.count} experts; each group needs two or more")
    experts = replace(experts, sigmoid=True, normalise=fields.flag("norm_topk_prob", True))
    config = _latent_attention(fields, experts, interleaved=fields.flag("rope_interleave", True))
    return replace(config, names=replace(config.names, router_correction="mlp.gate.e_score_correction_bias"))


def _deepseek_experts(fields: Fields, groups: int, scale: float) -> ExpertsConfig:
    count = fields.count("n_routed_experts", most=_MAX_EXPERTS)
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
        normalise=False,
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
    latent = LatentConfig(
        rank=fields.count("kv_lora_rank", 512),
        query_rank=query_rank and fields.count("q_lora_rank", query_rank),
        plain_dim=fields.count("qk_nope_head_dim", 128),
        rotary_dim=fields.count("qk_rope_head_dim", 64),
        value_dim=fields.count("v_head_dim", 128),
    )
    # Checkpoints leave head_dim out, or give any of three widths.
    config = _plain(fields.replaced(head_dim=latent.rotary_dim, num_key_value_heads=1))
    queries = ("self_attn.q_a_proj" if query_rank else "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa")
    turned = (_DEEPSEEK.query_up if query_rank else queries[0], queries[1])
    unused = fields.count("num_nextn_predict_layers", 1, most=_MAX_LAYERS, least=0)
    names = replace(
        _DEEPSEEK,
        qkv=queries,
        neighbors=turned if interleaved else (),
        foreign=tuple(f"model.layers.{config.num_layers + each}." for each in range(unused)),
    )
    config = replace(
        config,
        head_dim=latent.rank + latent.rotary_dim,
        attention_scale=latent.query_dim**-0.5 * read_sharpening(fields) ** 2,
        latent=latent,
        names=names,
    )
    dense = fields.count("first_k_dense_replace", least=0)
    return _with_experts(config, experts, [layer >= dense for layer in range(config.num_layers)])


def _turns(fields: Fields) -> list[Any]:
    """For each layer a true value if it has rotary embedding."""
    interval, num_layers = fields.count("no_rope_layer_interval", 4), _num_layers(fields)
    turns = fields.items("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if len(turns) != num_layers:
        fields.refuse(f"no_rope_layers has {len(turns)} entries for {num_layers} layers")
    return turns


def _with_turns(config: ModelConfig, turns: Sequence[Any]) -> ModelConfig:
    layers = zip(config.layers, turns, strict=True)
    return replace(config, layers=tuple(layer if turn else replace(layer, rope=None) for layer, turn in layers))


def _num_layers(fields: Fields) -> int:
    return fields.count("num_hidden_layers", most=_MAX_LAYERS)


def _window(fields: Fields, absent: int = 0) -> int:
    """The window, 0 for none; `absent` is the value for a config without the field."""
    if fields.has("sliding_window"):
        return 0 if fields.get("sliding_window") is None else fields.count("sliding_window")
    return absent


def _everywhere(fields: Fields, window: int) -> list[int]:
    return [window] * _num_layers(fields)


def _upper_windows(fields: Fields) -> list[int]:
    """Qwen: layers from `max_window_layers` on have a window, if any has."""
    if not fields.flag("use_sliding_window", False):
        return _everywhere(fields, 0)
    full = fields.number("max_window_layers", 28)
    types = ["full_attention" if layer < full else "sliding_attention" for layer in range(_num_layers(fields))]
    return _typed_windows(fields, types, _window(fields, absent=4096))


def _typed_windows(fields: Fields, types: Sequence[str], window: int, windowed: str = "sliding_attention") -> list[int]:
    """Each layer's window by its type; `types` is the default for a config without `layer_types`."""
    types = fields.items("layer_types") or types
    known = {"full_attention": 0, windowed: window}
    unknown = [each for each in types if each not in known]
    if unknown:
        fields.refuse(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(known)}")
    if len(types) != _num_layers(fields):
        fields.refuse(f"layer_types has {len(types)} entries for {_num_layers(fields)} layers")
    return [known[each] for each in types]


def _softcap(fields: Fields, name: str, absent: float | None) -> float:
    """The cap, 0 for none; `absent` is the value for a config without the field."""
    return fields.number(name, 0.0) if fields.has(name) else absent or 0.0


def _qwen_experts(fields: Fields, count: int, per_token: int) -> ExpertsConfig:
    return ExpertsConfig(
        count=fields.count("num_experts", fields.count("num_local_experts", count), most=_MAX_EXPERTS),
        per_token=fields.count("num_experts_per_tok", per_token),
        ffn_size=fields.count("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob", False),
    )


def _sparse_layers(fields: Fields) -> list[bool]:
    """Qwen: every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.items("mlp_only_layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(_num_layers(fields))]


def _with_experts(config: ModelConfig, experts: ExpertsConfig, sparse: Sequence[bool]) -> ModelConfig:
    layers = zip(config.layers, sparse, strict=True)
    return replace(config, experts=experts, layers=tuple(replace(layer, has_experts=each) for layer, each in layers))


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
    "DeepseekV2ForCausalLM": _deepseek2,
    "DeepseekV3ForCausalLM": _deepseek3,
}
