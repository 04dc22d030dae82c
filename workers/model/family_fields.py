"""What families share: the fields of most decoders in a config.json, windows by layer, and which layers have experts.

Knows fields; knows no architecture by name.
"""

from collections.abc import Sequence
from dataclasses import replace

from workers.model.description import SILU, ExpertsConfig, LayerConfig, ModelConfig, TensorNames
from workers.model.fields import Fields
from workers.model.rope_fields import read_rope

# More than any model has: refuses a damaged number before it allocates lists of that length.
MAX_LAYERS = 4096
MAX_EXPERTS = 4096


def read_plain(
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
    num_layers = read_num_layers(fields)
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


def read_num_layers(fields: Fields) -> int:
    return fields.count("num_hidden_layers", most=MAX_LAYERS)


def read_window(fields: Fields, absent: int = 0) -> int:
    """The window, 0 for none; `absent` is the value for a config without the field."""
    if fields.has("sliding_window"):
        return 0 if fields.get("sliding_window") is None else fields.count("sliding_window")
    return absent


def in_all_layers(fields: Fields, window: int) -> list[int]:
    return [window] * read_num_layers(fields)


def typed_windows(fields: Fields, types: Sequence[str], window: int, windowed: str = "sliding_attention") -> list[int]:
    """Each layer's window by its type; `types` is the default for a config without `layer_types`."""
    types = fields.items("layer_types") or types
    known = {"full_attention": 0, windowed: window}
    unknown = [each for each in types if each not in known]
    if unknown:
        fields.refuse(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(known)}")
    if len(types) != read_num_layers(fields):
        fields.refuse(f"layer_types has {len(types)} entries for {read_num_layers(fields)} layers")
    return [known[each] for each in types]


def with_experts(config: ModelConfig, experts: ExpertsConfig, sparse: Sequence[bool]) -> ModelConfig:
    layers = zip(config.layers, sparse, strict=True)
    return replace(config, experts=experts, layers=tuple(replace(layer, has_experts=each) for layer, each in layers))
