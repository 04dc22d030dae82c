"""Conversion to a narrower dtype that saturates: one infinity in KV would make a whole sequence NaN."""

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)  # bfloat16 has the range of float32


def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions; without them its products are many times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest, within the range of `dtype`. NaN stays NaN."""
    if dtype not in _NARROW:
        return values.to(dtype)
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)
