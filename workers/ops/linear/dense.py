"""Linear layers with floating-point weights, in the fastest form that this machine has.

A call with few rows is memory-bound: our kernel streams weights that were packed into panels once. A call with many
rows is compute-bound: oneDNN on the plain weights is as fast or faster. Both copies are kept. The plain weights are
mapped from the checkpoint, so processes share them and the system can evict them; only the packed copy is private.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops.linear.panels import Panels
from workers.ops.native.library import library

# Our kernel's time relative to MKL's (F.linear), all layers of a 135M model, 2 threads of an AVX-512 Xeon: 0.7x at 16
# rows, 0.75x at 64, 1.0x at 256 and 1.15x at 1024. On an AMD CPU MKL leaves AVX-512 aside: 0.35x at 64, 0.45x from 256
# on; there oneDNN takes 1.0x of ours from 256 on.
PANEL_ROWS = 256
# Speedup of oneDNN's reordered weights, on AVX2: 1.7-2.0x at 4 rows, 1.2-1.5x at 16, 1.1x at 64, below 1 from 128 on.
REORDERED_ROWS = 64
TILE_ROWS = 32  # of the reordered weights when all rows must be computed alike

Kernel = Callable[[Tensor], Tensor]


class Linear:
    """y = x Wᵀ + b in the weights' own dtype; exact. `deterministic`: see `make_linear`."""

    weight_format = "float32"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> None:
        self.weight, self.bias = weight, bias
        self._plain_from, self._few_rows, self._plain = _choose(weight, bias, deterministic)

    def __call__(self, x: Tensor) -> Tensor:
        if self._plain_from is not None and x.shape[0] >= self._plain_from:
            return self._plain(x)
        return self._few_rows(x)


def _choose(weight: Tensor, bias: Tensor | None, deterministic: bool) -> tuple[int | None, Kernel, Kernel]:
    """From how many rows on the plain weights are used (None: never), the kernel for fewer rows, and that for more."""
    plain = functools.partial(F.linear, weight=weight, bias=bias)
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if library() is not None:
            packed = Panels(weight, weight.shape[1], bias, "float32")
            many = functools.partial(_onednn, weight, bias) if has_onednn else plain
            return None if deterministic else PANEL_ROWS, packed, many
        if has_onednn:
            reordered = torch.ops.mkldnn._reorder_linear_weight(weight, TILE_ROWS)
            if deterministic:
                return None, functools.partial(_in_tiles, reordered, bias), plain
            return REORDERED_ROWS, functools.partial(_onednn, reordered, bias), plain
    if deterministic:
        return None, functools.partial(alike, weight, bias), plain
    return 0, plain, plain


def _onednn(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _in_tiles(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Always calls with `TILE_ROWS` rows: oneDNN computes each of them by the same steps wherever it is in the tile."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % TILE_ROWS))
    return torch.cat([_onednn(weight, bias, tile) for tile in torch.split(padded, TILE_ROWS)])[:rows]


def alike(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Each row by the same steps, whatever other rows there are."""
    if not weight.is_cuda:
        return torch.cat([F.linear(row, weight, bias) for row in torch.split(x, 1)])
    from workers.ops import triton_linear  # only where Triton is installed: torch for CUDA brings it

    return triton_linear.linear(x, weight, bias)
