"""Reads and checks a model folder's config.json and generation_config.json.

Knows what must hold for any decoder; `workers.model.families` knows the fields of each family. Knows no weights and no
torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.errors import InvalidRequest
from workers.model.description import GenerationDefaults, ModelConfig
from workers.model.families import describe
from workers.model.fields import Fields, read_fields
from workers.model.tensors import FP8_BLOCK
from workers.request import SamplingParams

__all__ = ["DTYPES", "ModelConfig", "read_model_config"]
DTYPES = ("float32", "bfloat16", "float16")


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration in `folder`. Raises `ModelError` naming the file and the invalid field."""
    fields = read_fields(folder / "config.json")
    path = folder / "generation_config.json"
    generation = read_fields(path) if path.exists() else Fields(path, {})
    config = replace(
        describe(fields),
        eos_token_ids=_eos_token_ids(fields, generation),
        dtype=_dtype(fields),
        generation=_generation_defaults(generation),
    )
    _check(fields, config)
    return config


def _check(fields: Fields, config: ModelConfig) -> None:
    if not (config.experts and config.experts.mxfp4):
        _refuse_quantized(fields)
    if config.num_heads % config.num_kv_heads:
        fields.refuse(f"{config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads")
    outside = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if outside:
        fields.refuse(f"end token {outside[0]} is outside the vocabulary of {config.vocab_size}")
    if config.experts and config.experts.per_token > config.experts.count:
        fields.refuse(f"{config.experts.per_token} of {config.experts.count} experts cannot be chosen for a token")


def _refuse_quantized(fields: Fields) -> None:
    quantization = fields.inner("quantization_config")
    method = quantization.get("quant_method", "unnamed")
    if method == "fp8" and quantization.get("weight_block_size") == [FP8_BLOCK] * 2:
        return  # the tensors themselves say which are; activations are not rounded
    if fields.get("quantization_config"):
        fields.refuse(
            f"quantization_config {method!r} is not supported; supported: {', '.join(DTYPES)} in safetensors, fp8 with "
            f"weight_block_size [{FP8_BLOCK}, {FP8_BLOCK}], or a GGUF file in any of its formats"
        )


def _eos_token_ids(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """generation_config.json takes precedence: chat models end turns with tokens that config.json omits."""
    source = generation if generation.get("eos_token_id") is not None else fields
    eos: Any = source.get("eos_token_id", [])
    tokens = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        source.refuse(f"eos_token_id is {eos!r}; it must be a token id or a list of them")
    return tuple(tokens)


def _generation_defaults(generation: Fields) -> GenerationDefaults:
    def number(name: str) -> float | None:
        return None if generation.get(name) is None else generation.number(name)

    top_k = number("top_k")
    defaults = GenerationDefaults(
        temperature=number("temperature"),
        top_k=None if top_k is None else max(0, int(top_k)),  # vLLM writes -1 for off
        top_p=number("top_p"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )
    try:
        SamplingParams(**dict(defaults.given()))  # type: ignore[arg-type]
    except InvalidRequest as error:  # fail now, not at every request
        generation.refuse(f"{error.field.removeprefix('sampling.')} {error.message}")
    return defaults


def _dtype(fields: Fields) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    if name not in DTYPES:
        fields.refuse(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return name
