"""What a slot of the pool holds: the K or V of one token and head, as numbers of the pool's dtype.

float16 saturates: one infinity would make a whole sequence NaN. A quantized slot, of int8 or fp8 (e4m3), ends in the
scale of its numbers, a float32: so it depends on its own vector alone, and is written once.
"""

import torch
from torch import Tensor

from kvtransfer.layout import SCALE_BYTES

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}  # number of a quantized slot


def torch_dtype(name: str) -> torch.dtype:
    """Of a KV dtype's name."""
    dtype: torch.dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
    return dtype


def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions; without them its products are many times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of weights and activations beside KV of `dtype`: float32 on a CPU, bfloat16 on a GPU beside quantized KV."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if dtype in LARGEST else dtype


def to_slots(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Slots [..., slot_size] of a pool of `dtype` for values [..., head_dim], rounded to nearest.

    float16 saturates. NaN stays NaN; NaN or infinity makes a whole quantized slot NaN.
    """
    if dtype in LARGEST:
        return _quantized(values.float(), dtype)
    if dtype == torch.float16:
        values = values.clamp(-65504.0, 65504.0)
    return values.to(dtype)


def from_slots(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., head_dim] in `dtype` of a pool's slots [..., slot_size]."""
    if slots.dtype not in LARGEST:
        return slots.to(dtype)
    scales = slots[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (slots[..., :-SCALE_BYTES].float() * scales).to(dtype)


def _quantized(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The vector's largest number becomes the dtype's largest. `attention.cpp` computes the same bits."""
    scales = (values.abs().amax(-1, keepdim=True) * (1 / LARGEST[dtype])).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (values * scales.reciprocal()).nan_to_num(0.0)
    numbers = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    return torch.cat([numbers.view(torch.int8), scales.view(torch.int8)], dim=-1).view(dtype)
