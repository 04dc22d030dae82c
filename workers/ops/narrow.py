"""Numbers in a narrower dtype: what exceeds its range becomes its largest number; one infinity spoils a sequence."""

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)  # the range of bfloat16 is that of float32


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; without them bfloat16 products are many times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest, within the range of `dtype`. NaN stays NaN."""
    if dtype not in _NARROW:
        return values.to(dtype)
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)
