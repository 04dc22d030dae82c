"""What a slot of the pool holds: the K or V of one token and head, as numbers of the pool's dtype.

Narrow floats saturate: one infinity would make a whole sequence NaN. An int8 slot ends in the scale of its numbers, a
float32: so it depends on its own vector alone, and is written once.
"""

import torch
from torch import Tensor

from kvtransfer.layout import SCALE_BYTES

_NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)  # bfloat16 has the range of float32


def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions; without them its products are many times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of weights and activations beside KV of `dtype`: float32 on a CPU, bfloat16 on a GPU beside int8."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if dtype == torch.int8 else dtype


def to_slots(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Slots [..., slot_size] of a pool of `dtype` for values [..., head_dim], rounded to nearest.

    float16 and float8 saturate. NaN stays NaN; in int8, NaN or infinity makes its whole slot NaN.
    """
    if dtype == torch.int8:
        return _quantized(values.float())
    if dtype not in _NARROW:
        return values.to(dtype)
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def from_slots(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., head_dim] in `dtype` of a pool's slots [..., slot_size]."""
    if slots.dtype != torch.int8:
        return slots.to(dtype)
    scales = slots[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (slots[..., :-SCALE_BYTES].float() * scales).to(dtype)


def _quantized(values: Tensor) -> Tensor:
    """The largest number becomes 127. `attention.cpp` computes the same bits."""
    scales = (values.abs().amax(-1, keepdim=True) * (1 / 127)).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (values * scales.reciprocal()).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat([numbers, scales.view(torch.int8)], dim=-1)
