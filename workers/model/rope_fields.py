"""The rotary embedding that a config.json asks for, in any of the hub's ways of writing it.

`rope_parameters` holds everything, or one such object per kind of layer; older checkpoints have `rope_theta` beside a
`rope_scaling`. Knows the fields; the frequencies are `workers.model.rope`'s.
"""

import math

from workers.model.description import RopeConfig
from workers.model.fields import Fields


def read_rope(fields: Fields, head_dim: int, context_length: int, layer_type: str = "") -> RopeConfig:
    """The embedding of layers of that type, or of all. Raises `ModelError` for a scaling that we do not compute."""
    rope = fields.inner("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    if layer_type and rope.has(layer_type):
        rope = rope.inner(layer_type)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    part = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * part)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        fields.refuse(f"{rotary_dim} of head_dim {head_dim} features turn; rotary embedding needs an even number")
    return read_scaling(rope, fields, theta, rotary_dim, context_length)


def read_scaling(rope: Fields, fields: Fields, theta: float, rotary_dim: int, context_length: int) -> RopeConfig:
    """How `rope` stretches the frequencies; `fields` is the config around it."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("su", "yarn") and rope.has("long_factor"):
        kind = "longrope"  # its earlier names
    original = fields.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original_context = int(original or context_length)

    def need(name: str) -> float:
        if not rope.has(name):
            fields.refuse(f"rope scaling {kind} lacks {name!r}")
        return rope.number(name)

    if kind in ("default", "dynamic"):  # "dynamic" stretches only beyond the context length, where we never go
        return RopeConfig(theta, rotary_dim)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, kind, factor=need("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor=need("factor"),
            low_freq_factor=need("low_freq_factor"),
            high_freq_factor=need("high_freq_factor"),
            original_context=original_context,
        )
    if kind == "yarn":
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor=rope.number("factor", context_length / original_context),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            original_context=original_context,
            magnitude=_yarn_magnitude(rope, rope.number("factor", context_length / original_context)),
        )
    if kind == "longrope":
        # One choice for the model's whole context: KV of short and long requests stays interchangeable.
        name = "long_factor" if context_length > original_context else "short_factor"
        divisors = tuple(float(divisor) for divisor in rope.items(name))
        if len(divisors) != rotary_dim // 2:
            fields.refuse(f"rope scaling {kind}: {name} has {len(divisors)} numbers, {rotary_dim // 2} frequencies")
        stretch = rope.number("factor", context_length / original_context)
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(original_context)) if stretch > 1 else 1.0
        return RopeConfig(
            theta, rotary_dim, "divisors", divisors=divisors, magnitude=rope.number("attention_factor", magnitude)
        )
    fields.refuse(
        f"rope scaling {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn, longrope"
    )


def _yarn_magnitude(rope: Fields, factor: float) -> float:
    """Peng et al., YaRN (2023), section 3.4, and the two weights that DeepSeek's configs add to it."""

    def sharpened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    inferred = sharpened(weight) / sharpened(weight_all) if weight and weight_all else sharpened(1.0)
    return rope.number("attention_factor", inferred)
