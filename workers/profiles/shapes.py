"""Model shapes: the size of weights and KV, and FLOPs per token. Knows no hardware and no weights.

Without norms and biases; within 1 % of the published numbers of parameters.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvtransfer.layout import slot_bytes
from workers.errors import ModelError
from workers.model.description import LinearAttentionConfig, MLAConfig, ModelConfig
from workers.model.families import FAMILIES, describe
from workers.model.fields import Fields
from workers.model.kv_layers import STATE_BYTES, min_block_size
from workers.profiles.profile_errors import ProfileError, UnknownName


def _latent_parameters(latent: MLAConfig, hidden: int, heads: int) -> int:
    """Of one layer's attention."""
    queries = heads * latent.qk_head_dim
    of_queries = latent.q_lora_rank * (hidden + queries) if latent.q_lora_rank else hidden * queries
    values = heads * latent.v_head_dim
    up = latent.kv_lora_rank * (heads * latent.qk_nope_head_dim + values)
    return of_queries + hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim) + up + values * hidden


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Linear attention in `runs` of so many layers that follow each other. In such models attention has a gate."""

    sizes: LinearAttentionConfig
    runs: tuple[int, ...]

    @property
    def layers(self) -> int:
        return sum(self.runs)

    def parameters(self, hidden: int) -> int:
        """Of one layer: projections, gates, convolution and output."""
        keys = self.sizes.key_heads * self.sizes.key_dim
        values = self.sizes.value_heads * self.sizes.value_dim
        channels = 2 * keys + values
        return hidden * (channels + 2 * values + 2 * self.sizes.value_heads) + channels * self.sizes.kernel

    def state_bytes(self, kv_heads: int) -> int:
        """Of one layer, for one KV head."""
        return STATE_BYTES * sum(self.sizes.state_numbers(kv_heads))


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """`per_token` of `count` experts, each `ffn` wide, and a shared one of `shared_ffn`, in all but `dense` layers."""

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    dense: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. `positions`: learned position embeddings. `element_bytes`: of weights, and of KV unless `kv_dtype` is
    set. With `latent` there is one KV head, and `head_dim` is the width of its vectors. `block_size`: tokens of a KV
    block, each of which also has the state of `linear` layers. `context_length`: of the longest sequence; 0: unknown.

    Raises `ProfileError` when a number is not positive, or query heads cannot share the KV heads.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    element_bytes: int = 2
    kv_dtype: str = ""
    latent: MLAConfig | None = None
    experts: ExpertsShape | None = None
    linear: LinearShape | None = None
    block_size: int = 16
    context_length: int = field(default=0, compare=False)  # costs do not depend on it

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in ("positions", "context_length") else 1
            if each.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ProfileError(f"model {self.name!r}: {each.name} is {value!r}; it must be an integer >= {least}")
        if self.heads % self.kv_heads:
            raise ProfileError(f"model {self.name!r}: {self.heads} heads cannot share {self.kv_heads} KV heads")

    @property
    def attention_layers(self) -> int:
        """Those with K and V of each token."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def layer_parameters(self) -> int:
        """Of all layers, without head and embeddings."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        if self.latent is not None:
            attention = _latent_parameters(self.latent, self.hidden, self.heads)
        linear = 0
        if self.linear is not None:
            attention += self.hidden * self.heads * self.head_dim
            linear = self.linear.layers * self.linear.parameters(self.hidden)
        ffn = self.layers * self.ffn
        if (experts := self.experts) is not None:
            ffn = experts.dense * self.ffn + (self.layers - experts.dense) * experts.shared_ffn
        outside = self.attention_layers * attention + linear + self.expert_parameters
        return outside + (3 if self.gated else 2) * self.hidden * ffn

    @property
    def expert_parameters(self) -> int:
        """Of all experts but the shared ones."""
        if self.experts is None:
            return 0
        return (self.layers - self.experts.dense) * self.experts.count * 3 * self.hidden * self.experts.ffn

    @property
    def active_parameters(self) -> int:
        """Of all layers, those that one token is multiplied with."""
        if self.experts is None:
            return self.layer_parameters
        idle = self.experts.count - self.experts.per_token
        return self.layer_parameters - self.expert_parameters * idle // self.experts.count

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = (self.vocab * (1 if self.tied else 2) + self.positions) * self.hidden
        return self.layer_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.element_bytes

    @property
    def context_bytes_per_token(self) -> int:
        """K and V, or the latent, of all layers that have it, with the scales of quantized numbers."""
        return self.attention_layers * self.kv_heads * self._token_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """A token's part of a block, with the state that each block has: as `workers.model.kv_layers` lays it out."""
        states = 0
        if self.linear is not None:
            state_bytes, cell_bytes = self.linear.state_bytes(self.kv_heads), self.block_size * self._token_bytes
            states = sum(-(-run * state_bytes // cell_bytes) for run in self.linear.runs)
        return (self.attention_layers + states) * self.kv_heads * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Of one layer and KV head."""
        of_one = slot_bytes(self.head_dim, self.kv_dtype) if self.kv_dtype else self.head_dim * self.element_bytes
        return of_one if self.latent else 2 * of_one

    @property
    def state_bytes(self) -> int:
        """Of a sequence, in all layers with linear attention."""
        return self.linear.layers * self.kv_heads * self.linear.state_bytes(self.kv_heads) if self.linear else 0

    @property
    def token_flops(self) -> float:
        """Of one token in all layers, without attention to others. A number of a state takes three multiplications and
        additions: it decays, takes in the token, and is read."""
        numbers = 0
        if self.linear is not None:
            sizes = self.linear.sizes
            numbers = self.linear.layers * sizes.value_heads * sizes.key_dim * sizes.value_dim
        return 2.0 * self.active_parameters + 6.0 * numbers

    @property
    def attention_flops_per_pair(self) -> int:
        """Scores and weighted sum for one query and one key token, in all layers."""
        return 4 * self.attention_layers * self.heads * self.head_dim

    def prefill_flops(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """Of all layers for a prompt of n tokens, p of them cached: 2N(n - p) + 2Ld(n² - p²).

        Without the head, which computes only one token of a prompt.
        """
        pairs = (num_tokens**2 - cached_tokens**2) / 2
        return self.token_flops * (num_tokens - cached_tokens) + self.attention_flops_per_pair * pairs

    def decode_flops(self, context_tokens: int) -> float:
        """Of one token that attends to `context_tokens`, head included."""
        return self.token_flops + 2.0 * self.head_parameters + self.attention_flops_per_pair * context_tokens


def _shape(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any
) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, kv_heads, ffn, vocab, more.pop("head_dim", hidden // heads), **more)


_LITE: dict[str, Any] = {
    **{"head_dim": 576, "latent": MLAConfig(512, 0, 128, 64, 128)},
    "experts": ExpertsShape(64, 6, 1408, shared_ffn=2816, dense=1),
    "context_length": 163_840,
}
_V2 = _LITE | {
    "latent": MLAConfig(512, 1536, 128, 64, 128),
    "experts": ExpertsShape(160, 6, 1536, shared_ffn=3072, dense=1),
}
_V3 = _V2 | {"experts": ExpertsShape(256, 8, 2048, shared_ffn=2048, dense=3)}
_OPT: dict[str, Any] = {"gated": False, "tied": True, "positions": 2050, "context_length": 2048}
SHAPES = {
    shape.name: shape
    for shape in (
        _shape("opt-13b", 40, 5120, 40, 40, 20480, 50272, **_OPT),
        _shape("opt-66b", 64, 9216, 72, 72, 36864, 50272, **_OPT),
        _shape("opt-175b", 96, 12288, 96, 96, 49152, 50272, **_OPT),
        _shape("bloom-176b", 70, 14336, 112, 112, 57344, 250880, gated=False, tied=True, context_length=2_048),
        _shape("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, context_length=4_096),
        _shape("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, context_length=4_096),
        _shape("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, context_length=4_096),
        _shape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, context_length=8_192),
        _shape("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, context_length=8_192),
        _shape("mistral-7b", 32, 4096, 32, 8, 14336, 32000, context_length=32_768),
        _shape("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True, context_length=32_768),
        _shape("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, context_length=131_072),
        _shape("qwen3-0.6b", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tied=True, context_length=40_960),
        _shape("deepseek-v2-lite", 27, 2048, 16, 1, 10944, 102400, **_LITE),
        _shape("deepseek-v2", 60, 5120, 128, 1, 12288, 102400, **_V2),
        _shape("deepseek-v3", 61, 7168, 128, 1, 18432, 129280, **_V3),
        _shape("smollm2-135m", 30, 576, 9, 3, 1536, 49152, tied=True, context_length=8_192),
    )
}
# The weights that `serve` takes for these shapes: hub ids (Meta's need an accepted license and a token) and a short
# name. OPT and BLOOM can only be planned and simulated.
WEIGHTS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "smollm2-135m": "smollm2-135m",
}
_ENDINGS = ("-hf", "-instruct", "-chat", "-base", "-v0.1", "-v0.2", "-v0.3", "-it")
_FIRST = {"meta-llama-": "llama-", "llama2-": "llama-2-", "llama3-": "llama-3-"}


def canonical(name: str) -> str:
    """The model's name in `SHAPES`: "llama-2-70b" for "meta-llama/Llama-2-70b-chat-hf" and "llama2-70b"."""
    short = name.strip().lower().rsplit("/", 1)[-1]
    while ending := next((each for each in _ENDINGS if short.endswith(each)), None):
        short = short.removesuffix(ending)
    for first, plain in _FIRST.items():
        if short.startswith(first):
            short = plain + short.removeprefix(first)
    return {"bloom": "bloom-176b"}.get(short, short)


def shape_of(model: str | ModelShape) -> ModelShape:
    """By name, or from a config.json or its folder. Raises `ProfileError`."""
    if isinstance(model, ModelShape):
        return model
    if (known := SHAPES.get(canonical(model))) is not None:
        return known
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        return read_shape(path)
    raise UnknownName("model", model, SHAPES, "; or give the path of a config.json")


def read_shape(path: Path) -> ModelShape:
    """From a Hugging Face config.json, as the model loader reads it where Diptych serves the architecture; of others
    only dense decoders. Raises `ProfileError`."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read as a model's config.json: {error}") from None
    if not isinstance(config, dict):
        raise ProfileError(f"{path} holds no JSON object")
    if any(name in FAMILIES for name in (config.get("architectures") or ())[:1]):
        try:
            shape = _served(path, config, describe(Fields(path, config)))
        except ModelError as error:
            raise ProfileError(str(error)) from None
    else:
        shape = _dense(path, config)
    known = SHAPES.get(canonical(shape.name))
    return known if known == replace(shape, name=known.name if known else "") else shape


def _served(path: Path, config: dict[str, Any], model: ModelConfig) -> ModelShape:
    experts, linear = None, None
    if (found := model.experts) is not None:
        dense = sum(not layer.has_experts for layer in model.layers)
        experts = ExpertsShape(found.count, found.per_token, found.ffn_size, found.shared_ffn_size, dense)
    if model.linear is not None:
        runs = tuple(end - first for first, end in model.runs if model.layers[first].is_linear)
        linear = LinearShape(model.linear, runs)
    element_bytes = _element_bytes(config)
    return ModelShape(
        name=str(config.get("_name_or_path") or path.parent.name),
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        ffn=model.ffn_size,
        vocab=model.vocab_size,
        head_dim=model.head_dim,
        tied=model.tie_embeddings,
        element_bytes=element_bytes,
        latent=model.latent,
        experts=experts,
        linear=linear,
        block_size=max(16, min_block_size(model, "float32" if element_bytes == 4 else "bfloat16")),
        context_length=model.context_length,
    )


def _element_bytes(config: dict[str, Any]) -> int:
    text = config.get("text_config") or {}
    dtype = next((at[key] for at in (config, text) for key in ("torch_dtype", "dtype") if at.get(key)), "bfloat16")
    return {"float32": 4, "float8_e4m3fn": 1, "int8": 1}.get(str(dtype).removeprefix("torch."), 2)


def _dense(path: Path, config: dict[str, Any]) -> ModelShape:
    unlike = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "linear_num_value_heads")
    if any(config.get(key) for key in unlike):
        raise ProfileError(
            f"{path}: experts, latent or linear attention of an architecture that Diptych does not serve "
            f"({config.get('architectures')}) have no cost model"
        )

    def first(*keys: str) -> Any:
        found = next((config[key] for key in keys if config.get(key) is not None), None)
        if found is None:
            raise ProfileError(f"{path} has no {' or '.join(keys)}; it must state the shape of a decoder")
        return found

    hidden, heads = first("hidden_size", "n_embd", "n_embed"), first("num_attention_heads", "n_head", "num_heads")
    if not (isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0):
        raise ProfileError(f"{path}: hidden size {hidden!r} and {heads!r} heads; both must be positive integers")
    kind = str(config.get("model_type", ""))
    gated = kind not in ("opt", "bloom", "gpt2", "gpt_neox", "gptj", "falcon", "phi", "starcoder2")
    ffn = next((config[key] for key in ("intermediate_size", "ffn_dim", "n_inner") if config.get(key)), 4 * hidden)
    return ModelShape(
        name=str(config.get("_name_or_path") or path.parent.name or kind),
        layers=first("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads),
        ffn=ffn,
        vocab=first("vocab_size"),
        head_dim=config.get("head_dim") or hidden // heads,
        gated=gated,
        tied=bool(config.get("tie_word_embeddings", kind in ("opt", "bloom", "gpt2"))),
        positions=config.get("max_position_embeddings", 0) + 2 if kind == "opt" else config.get("n_positions", 0),
        element_bytes=_element_bytes(config),
        context_length=config.get("max_position_embeddings") or config.get("n_positions") or 0,
    )
