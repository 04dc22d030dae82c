"""Rotary position embedding: the tables of cosines and sines, and the turn itself.

Source: Su et al., RoFormer (2021); the "llama3" stretch as published with Llama 3.1.
"""

import math

import torch
from torch import Tensor

from workers.model.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim] in float32, both halves of a row alike."""
    frequencies = _frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim/2]) of x [tokens, heads, head_dim] by cos, sin [tokens, 1, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each pair [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    # llama3: short wavelengths stay, long ones stretch, and between the two bounds the weight slides from 0 to 1.
    turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor
