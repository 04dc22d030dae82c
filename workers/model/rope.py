"""Rotary position embedding: frequencies, and angles at given positions.

Source: Su et al., RoFormer (2021); linear: Chen et al. (2023); yarn: Peng et al., YaRN (2023); divisors: Ding et al.,
LongRoPE (2024); "llama3": as published with Llama 3.1.
"""

import math

import torch
from torch import Tensor

from workers.model.description import RopeConfig


def frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position for each pair of features, [rotary_dim / 2] in float32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        # Short wavelengths are unscaled, long ones divided; between the bounds the weight goes from 0 to 1.
        turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
        keep = (turns - rope.low_freq_factor) / max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
        return _blend(keep.clamp(0.0, 1.0), plain, rope.factor)
    if rope.kind == "yarn":
        return _blend(1.0 - _yarn_ramp(rope), plain, rope.factor)
    if rope.kind == "divisors":
        return 1.0 / (torch.tensor(rope.divisors) * rope.theta**exponents)
    assert rope.kind == "default", rope.kind
    return plain


def angles(positions: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, 1, rotary_dim / 2] for positions [tokens]."""
    turned = positions[:, None, None].float() * frequencies  # half precision would be wrong by whole turns
    return (turned.cos() * magnitude).to(dtype), (turned.sin() * magnitude).to(dtype)


def _blend(keep: Tensor, plain: Tensor, factor: float) -> Tensor:
    return keep * plain + (1.0 - keep) * plain / factor


def _yarn_ramp(rope: RopeConfig) -> Tensor:
    """0 for frequencies to leave, 1 for those to divide, [rotary_dim / 2]."""

    def feature_with(turns: float) -> float:
        """The feature whose frequency makes this many turns within the original context."""
        ratio = math.log(rope.original_context / (turns * 2 * math.pi)) / math.log(rope.theta)
        return rope.rotary_dim * ratio / 2

    first, last = feature_with(rope.beta_fast), feature_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    last += 0.001 if first == last else 0.0
    return ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
