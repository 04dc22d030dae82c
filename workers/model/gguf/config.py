"""Translates a GGUF file's metadata into the config.json of a hub checkpoint.

Knows keys and architectures; knows no weights, except the few tensors that hold rope factors. Also has the constants
that a GGUF omits because they are in llama.cpp's code.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from workers.errors import ModelError

T = TypeVar("T", int, float)


class Metadata:
    """The key-value pairs of one file, without the architecture prefix of their names, and its tensors' shapes."""

    def __init__(self, source: Path, pairs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.source = source
        self.shapes = shapes
        self._pairs = pairs
        self.architecture = str(pairs.get("general.architecture"))
        if self.architecture not in FAMILIES:
            self.refuse(f"GGUF architecture {self.architecture!r} is unknown; known are {', '.join(FAMILIES)}")
        if int(pairs.get("split.count", 1)) > 1:
            self.refuse("is one part of a split model; join the parts with llama.cpp's llama-gguf-split --merge")

    def get(self, name: str, default: Any = None) -> Any:
        return self._pairs.get(f"{self.architecture}.{name}", default)

    def whole(self, name: str, default: int | None = None) -> int:
        return self._scalar(name, int, default)

    def real(self, name: str, default: float | None = None) -> float:
        return self._scalar(name, float, default)

    def token(self, name: str) -> int | None:
        token = self._pairs.get(f"tokenizer.ggml.{name}_token_id")
        return None if token is None else int(token)

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.source}: {reason}")

    def _scalar(self, name: str, kind: Callable[[Any], T], default: T | None) -> T:
        value = self.get(name, default)
        if value is None:
            self.refuse(f"the GGUF metadata lack {self.architecture}.{name}")
        if isinstance(value, list):
            self.refuse(f"{self.architecture}.{name} differs between layers, which is not supported")
        return kind(value)


def hub_config(metadata: Metadata, factors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    """The config.json of the file's model; `factors` has the numbers of its rope tensors. Raises `ModelError`."""
    config = _plain(metadata, factors)
    turned = config["rope_parameters"].get("partial_rotary_factor")
    architecture, model_type, rest = FAMILIES[metadata.architecture]
    config |= {"architectures": [architecture], "model_type": model_type} | rest(metadata, config)
    if turned and config["model_type"] != "phi3":
        metadata.refuse(f"{turned:.0%} of a head's features are rotated, which is supported for architecture phi3 only")
    return config


def _plain(metadata: Metadata, factors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    if "token_embd.weight" not in metadata.shapes:
        metadata.refuse("tensor token_embd.weight is missing")
    heads, hidden = metadata.whole("attention.head_count"), metadata.whole("embedding_length")
    head_dim = metadata.whole("attention.key_length", hidden // heads)
    ends = sorted({end for end in (metadata.token("eos"), metadata.token("eot")) if end is not None})
    return {
        "vocab_size": metadata.shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": metadata.whole("feed_forward_length", metadata.get("expert_feed_forward_length")),
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.whole("context_length"),
        # Stored as float32: seven digits restore the original number.
        "rms_norm_eps": float(f"{metadata.real('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_parameters": _rope(metadata, factors, head_dim),
        "tie_word_embeddings": "output.weight" not in metadata.shapes,
        "attention_bias": "blk.0.attn_output.bias" in metadata.shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in metadata.shapes,
        "hidden_act": "silu",
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "dtype": "float32",
    }


def _rope(metadata: Metadata, factors: Mapping[str, tuple[float, ...]], head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base", 10000.0)}
    rotary_dim = metadata.whole("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    context_length = metadata.whole("context_length")
    original = metadata.whole("rope.scaling.original_context_length", context_length)
    short = factors.get("rope_factors_short.weight") or factors.get("rope_freqs.weight")
    if short:  # longrope, or llama3 as factors, which are the same for all contexts
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original, "short_factor": list(short)}
        rope["long_factor"] = list(factors.get("rope_factors_long.weight") or short)
        rope["attention_factor"] = metadata.real("rope.scaling.attn_factor", 1.0)
        return rope
    kind = metadata.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": metadata.real("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        for ours, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if metadata.get(f"rope.scaling.{key}") is not None:
                rope[ours] = metadata.real(f"rope.scaling.{key}")
    if kind not in ("none", "linear", "yarn"):
        metadata.refuse(f"rope scaling {kind!r} in a GGUF is not supported; use the safetensors checkpoint")
    return rope


def _llama(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Llama, Mistral and Mixtral are one architecture in GGUF."""
    window = metadata.whole("attention.sliding_window", 0) or None
    if metadata.get("expert_count"):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": metadata.whole("expert_count"),
            "num_experts_per_tok": metadata.whole("expert_used_count"),
            "sliding_window": window,
        }
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {}


def _qwen2_moe(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    width = metadata.whole("expert_shared_feed_forward_length")
    return _experts(metadata, normalized=False) | {"shared_expert_intermediate_size": width}


def _qwen3_moe(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return _experts(metadata, normalized=True)


def _experts(metadata: Metadata, normalized: bool) -> dict[str, Any]:
    """`normalized`: llama.cpp's default for the architecture."""
    return {
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", normalized)),
    }


def _gemma2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(metadata, config, global_every=2, layers_of_27b=46)


def _gemma3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base_swa", 10000.0)}
    rope = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return _gemma(metadata, config, global_every=6, layers_of_27b=62) | {"rope_parameters": rope}


def _gemma(metadata: Metadata, config: dict[str, Any], global_every: int, layers_of_27b: int) -> dict[str, Any]:
    """llama.cpp hard-codes which layers are global, and that only the 27B scales queries by hidden size / heads."""
    pattern = metadata.get("attention.sliding_window_pattern", global_every)
    num_layers = config["num_hidden_layers"]
    local = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    scalar = config["hidden_size"] // config["num_attention_heads"]
    scalar = scalar if num_layers == layers_of_27b else config["head_dim"]
    if metadata.get("attention.scale") is not None:
        scalar = float(f"{metadata.real('attention.scale') ** -2:.6g}")
    caps = {name: metadata.real(name, 0.0) or None for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return caps | {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if each else "full_attention" for each in local],
        "sliding_window": metadata.whole("attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
    }


def _phi3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    context_length = config["max_position_embeddings"]
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length", context_length),
    }


# The hub's architecture and model type, and what a config has besides `_plain`.
FAMILIES: dict[str, tuple[str, str, Callable[[Metadata, dict[str, Any]], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", lambda *_: {}),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", lambda *_: {}),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "phi3": ("Phi3ForCausalLM", "phi3", _phi3),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", lambda *_: {"no_rope_layer_interval": 4}),
}
