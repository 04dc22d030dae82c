"""Reads the rotary embedding from a config.json, in any of the hub's formats.

`rope_parameters` holds everything, or one such object per layer type; older checkpoints have `rope_theta` and
`rope_scaling`. Knows the fields; `workers.model.rope` computes the frequencies.
"""

import math
from dataclasses import replace

from workers.model.description import RopeConfig
from workers.model.fields import Fields


def read_rope(
    fields: Fields,
    head_dim: int,
    context_length: int,
    layer_type: str = "",
    theta: float = 10000.0,
    partial_rotary: bool = False,
) -> RopeConfig:
    """The embedding of layers of that type, or of all layers; `theta` is the family's default. Raises `ModelError`.

    `partial_rotary`: whether the family supports `partial_rotary_factor`. Transformers' code for the other families
    ignores it if the embedding is unscaled, and fails if it is scaled.
    """
    rope = fields.inner("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    if layer_type and rope.has(layer_type):
        rope = rope.inner(layer_type)
    theta = rope.number("rope_theta", fields.number("rope_theta", theta, above=1), above=1)
    part = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if part != 1 and not partial_rotary:
        if (kind := _kind(rope)) != "default":
            name = fields.items("architectures")[:1] or ["this family"]
            why = f"{name[0]} rotates all features"
            fields.refuse(f"partial_rotary_factor {part:g} with rope scaling {kind!r}: {why}; leave it out")
        part = 1.0
    rotary_dim = int(head_dim * part)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        fields.refuse(
            f"{rotary_dim} of head_dim {head_dim} features are rotated; rotary embedding needs an even number"
        )
    original = fields.count(
        "original_max_position_embeddings", rope.count("original_max_position_embeddings", context_length)
    )
    return _scaled(RopeConfig(theta, rotary_dim, original_context=original), rope, context_length)


def read_sharpening(fields: Fields) -> float:
    """By how much DeepSeek's models multiply queries and keys each, beyond the rotation's magnitude."""
    rope = fields.inner("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    weight = rope.number("mscale_all_dim", 0.0)
    return _sharpened(weight, rope.number("factor")) if weight and _kind(rope) != "default" else 1.0


def _sharpened(weight: float, factor: float) -> float:
    """Peng et al., YaRN (2023), section 3.4, with a weight as in DeepSeek's configs."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaled(plain: RopeConfig, rope: Fields, context_length: int) -> RopeConfig:
    """The embedding with the scaling in `rope`."""
    kind = _kind(rope)
    if kind in ("su", "yarn") and rope.has("long_factor"):
        kind = "longrope"  # its earlier names
    if kind in ("default", "dynamic"):  # "dynamic" only scales beyond the context length, which is never exceeded
        return replace(plain, original_context=0)
    if kind == "linear":
        return replace(plain, kind=kind, factor=_required(rope, kind, "factor"), original_context=0)
    if kind == "llama3":
        low, high = _required(rope, kind, "low_freq_factor"), _required(rope, kind, "high_freq_factor")
        if high < low:
            rope.refuse(f"rope scaling {kind}: high_freq_factor {high} must not be below low_freq_factor {low}")
        return replace(
            plain, kind=kind, factor=_required(rope, kind, "factor"), low_freq_factor=low, high_freq_factor=high
        )
    stretch = rope.number("factor", context_length / plain.original_context, above=0)
    if kind == "yarn":
        return replace(
            plain,
            kind=kind,
            factor=stretch,
            beta_fast=rope.number("beta_fast", 32.0, above=0),
            beta_slow=rope.number("beta_slow", 1.0, above=0),
            truncate=rope.flag("truncate", True),
            magnitude=_yarn_magnitude(rope, stretch),
        )
    if kind == "longrope":
        return _longrope(plain, rope, context_length, stretch)
    rope.refuse(f"rope scaling {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn, longrope")


def _kind(rope: Fields) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _longrope(plain: RopeConfig, rope: Fields, context_length: int, stretch: float) -> RopeConfig:
    """The divisors depend on the model's context, not on the request's length, so that requests can share KV."""
    name = "long_factor" if context_length > plain.original_context else "short_factor"
    divisors = rope.items(name)
    if len(divisors) != plain.rotary_dim // 2 or not all(
        isinstance(each, int | float) and each > 0 for each in divisors
    ):
        rope.refuse(f"rope scaling longrope: {name} must be {plain.rotary_dim // 2} positive numbers")
    magnitude = 1.0
    if stretch > 1:
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(max(plain.original_context, 2)))
    return RopeConfig(
        plain.theta,
        plain.rotary_dim,
        "divisors",
        divisors=tuple(float(each) for each in divisors),
        magnitude=rope.number("attention_factor", magnitude, above=0),
    )


def _required(rope: Fields, kind: str, name: str) -> float:
    if not rope.has(name):
        rope.refuse(f"rope scaling {kind} lacks {name!r}")
    return rope.number(name, above=0)


def _yarn_magnitude(rope: Fields, factor: float) -> float:
    weight, weight_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    both = weight and weight_all
    inferred = _sharpened(weight, factor) / _sharpened(weight_all, factor) if both else _sharpened(1.0, factor)
    return rope.number("attention_factor", inferred, above=0)
