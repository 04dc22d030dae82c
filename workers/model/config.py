"""The shape of a Llama-family model, read from a checkpoint's config.json.

Knows the architectures that `workers.model.llama` computes and refuses the rest by name. Knows no weights and no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta` and how its frequencies are stretched.

    `kind` is "default", "linear" (all divided by `factor`) or "llama3" (only wavelengths longer than
    original_context / low_freq_factor are divided, with a smooth passage up to original_context / high_freq_factor).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that fixes the computation, sizes in numbers of features, heads, layers or tokens."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint; what computes is chosen at load


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration in `folder`. Raises `ModelError` naming the file and the field that does not fit."""
    fields = read_json(folder / "config.json")
    architecture = _architecture(fields, folder)
    _refuse_unsupported(fields, folder)

    def number(name: str, default: int | None = None) -> int:
        value = fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{folder / 'config.json'}: {name} is {value!r}; it must be a positive whole number")
        return value

    hidden_size, num_heads = number("hidden_size"), number("num_attention_heads")
    config = ModelConfig(
        architecture=architecture,
        num_layers=number("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads", num_heads),
        head_dim=number("head_dim", hidden_size // num_heads),
        vocab_size=number("vocab_size"),
        context_length=number("max_position_embeddings", 2048),
        rms_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields, folder),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        eos_token_ids=_eos_token_ids(fields, folder),
        dtype=_dtype(fields, folder),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{folder / 'config.json'}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"{folder / 'config.json'}: head_dim is {config.head_dim}; rotary embedding needs an even one")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelError` when it is missing or is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: a model folder holds config.json, *.safetensors, tokenizer.json"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _architecture(fields: dict[str, Any], folder: Path) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name in ARCHITECTURES:
        return str(name)
    raise ModelError(
        f"{folder / 'config.json'}: architecture {name or 'unnamed'} is unknown; known are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: dict[str, Any], folder: Path) -> None:
    for name, plain in (
        ("hidden_act", "silu"),
        ("sliding_window", None),
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
    ):
        value = fields.get(name, plain)
        if value is not None and value != plain:
            raise ModelError(f"{folder / 'config.json'}: {name} {value!r} is not supported")


def _rope(fields: dict[str, Any], folder: Path) -> RopeConfig:
    # `rope_parameters` holds everything; older checkpoints have `rope_theta` beside a `rope_scaling`.
    rope: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, factor=float(rope["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta,
                kind,
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_context=int(rope["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'}: rope scaling {kind} lacks {error}") from None
    raise ModelError(
        f"{folder / 'config.json'}: rope scaling {kind!r} is not supported; known are default, linear, llama3"
    )


def _eos_token_ids(fields: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """generation_config.json has the last word: chat models end their turns with tokens that config.json omits."""
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = fields.get("eos_token_id") if eos is None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _dtype(fields: dict[str, Any], folder: Path) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    if name not in DTYPES:
        raise ModelError(f"{folder / 'config.json'}: dtype {name!r} is not one of {', '.join(DTYPES)}")
    return name
