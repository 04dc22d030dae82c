"""A decoder's configuration as plain values, common to all model families.

Knows sizes and features. Knows no file, no torch and no family.
"""

from dataclasses import dataclass, fields
from typing import Any

SILU = "silu"
GELU_TANH = "gelu_pytorch_tanh"
CLAMPED_SILU = "clamped_silu"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a head's first `rotary_dim` features, with base `theta`. `kind` scales its frequencies:

    "default": unscaled. "linear": all divided by `factor`. "llama3": divided for wavelengths longer than
    original_context / low_freq_factor, with a smooth transition up to original_context / high_freq_factor. "yarn":
    divided below `beta_slow` turns within the original context, unscaled above `beta_fast`, a ramp between; `truncate`
    rounds the ends of the ramp to whole features. "divisors": each divided by its own entry of `divisors`.
    `magnitude` multiplies cosines and sines.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_context: int = 0
    divisors: tuple[float, ...] = ()  # [rotary_dim / 2]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ between layers. `window`: the tokens that a query attends to, as in `workers.ops.batch`."""

    rope: RopeConfig | None  # None: no position embedding
    window: int = 0
    has_experts: bool = False
    is_linear: bool = False  # linear attention, as in `LinearAttentionConfig`, which has neither rope nor window


@dataclass(frozen=True, slots=True)
class Temperature:
    """Multiplies a query at position p by 1 + scale * log(1 + floor((p + 1) / every)) (Nakanishi, 2025)."""

    every: int
    scale: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A router selects `per_token` of `count` experts, each `ffn_size` wide.

    `normalize`: divide the weights of the selected experts by their sum; `scale` multiplies them. `sigmoid`: they are
    sigmoids of the scores, not a softmax; `scales_input`: they multiply an expert's input, not its output.
    `shared_ffn_size`: width of the shared expert; 0 is none. Of `groups` of consecutive experts, a token selects from
    the best `top_groups`. `bias`: of the router and of all experts. `stacked`: one tensor [experts, in, out] has the
    matrices of all experts; `interleaved`: gate and up are the even and odd columns of theirs; `mxfp4`: it is stored as
    MXFP4 blocks.
    """

    count: int
    per_token: int
    ffn_size: int
    normalize: bool = False
    shared_ffn_size: int = 0
    sigmoid: bool = False
    scales_input: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    stacked: bool = False
    interleaved: bool = False
    mxfp4: bool = False


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Gated DeltaNet: each value head reads the query and key of key head `value head * key_heads // value_heads`.

    `kernel`: tokens that the convolution before it takes in, the newest included. `grouped`: the checkpoint's
    projections have the rows of one key head after those of another, not those of one part after another.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    grouped: bool = False

    def state_numbers(self, kv_heads: int) -> tuple[int, int]:
        """float32 numbers of one layer's state for one of the model's KV heads: of the convolution, and the rest."""
        key_heads, value_heads = self.key_heads // kv_heads, self.value_heads // kv_heads
        channels = 2 * key_heads * self.key_dim + value_heads * self.value_dim
        return (self.kernel - 1) * channels, value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Latent attention (`workers.model.latent`): of each token, a latent of `kv_lora_rank` numbers and a key of
    `qk_rope_head_dim`; the names are those of DeepSeek's configs.

    A head's query has `qk_nope_head_dim` features that do not rotate, then `qk_rope_head_dim`; its value has
    `v_head_dim`. `q_lora_rank`: the width of the latent that queries come from; 0: they come from the layer's input.
    """

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensor names in a family's checkpoints. Several names are fused at load, in this order.

    Prefix of a layer's names: "{root}.layers.{index}."; an empty name is a part that the family does not have.
    """

    root: str = "model"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = ""
    key_norm: str = ""
    query_up: str = ""  # with latent attention
    kv_up: str = ""
    sinks: str = ""
    output: str = "self_attn.o_proj"
    attention_post_norm: str = ""
    ffn_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    ffn_post_norm: str = ""
    router: str = "mlp.gate"
    router_correction: str = ""  # added to each expert's score for the choice, not for its weight
    experts: str = "mlp.experts"  # then ".{expert}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_gate: str = "mlp.shared_expert_gate"  # its sigmoid weights the shared expert
    delta: str = "linear_attn"  # the linear attention; then "." and the names of `delta_parts` and others
    delta_parts: tuple[str, ...] = ()
    neighbors: tuple[str, ...] = ()  # q and k if they rotate pairs of neighboring rows, not of halves of a head
    foreign: tuple[str, ...] = ()  # name prefixes of ignored parts, such as a vision tower


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters that the model's authors recommend; None: no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: "GenerationDefaults") -> "GenerationDefaults":
        """These values, with `other`'s as the default."""
        values: dict[str, Any] = dict((*other.given(), *self.given()))
        return GenerationDefaults(**values)

    def given(self) -> tuple[tuple[str, float], ...]:
        """(name, value) of those that are set, by the names of `SamplingParams`."""
        return tuple((each.name, value) for each in fields(self) if (value := getattr(self, each.name)) is not None)


NO_OPINION = GenerationDefaults()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that determines the computation; sizes count features, heads, layers or tokens.

    With `latent` there is one KV head, and `head_dim` is the width of its vectors.
    """

    architecture: str
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    layers: tuple[LayerConfig, ...]
    rms_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint; the compute dtype is chosen at load
    attention_scale: float
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0  # 0: none
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # added to every stored norm weight
    activation: str = SILU
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    output_gate: bool = False  # the rows of each query head are followed by those of its gate
    linear: LinearAttentionConfig | None = None
    experts: ExpertsConfig | None = None
    rotated_norm: bool = False  # a norm of q and k without weights, after the rotation
    temperature: Temperature | None = None  # of layers without position embedding
    latent: MLAConfig | None = None
    names: TensorNames = TensorNames()
    generation: GenerationDefaults = NO_OPINION

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The layers as half-open ranges: linear ones that follow each other are one range, others are alone."""
        layers, starts = self.layers, [0]
        starts += [at for at in range(1, len(layers)) if not (layers[at].is_linear and layers[at - 1].is_linear)]
        return tuple(zip(starts, [*starts[1:], len(layers)], strict=True))

    @property
    def value_dim(self) -> int:
        """Of a head's output."""
        return self.latent.v_head_dim if self.latent else self.head_dim
