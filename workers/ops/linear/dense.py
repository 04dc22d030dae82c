"""Linear layers whose weights are floating-point numbers, in the fastest form that this machine has.

Few rows are memory-bound: our own kernel streams weights that were packed into panels once, and computes meanwhile.
Many rows are compute-bound, and there MKL on the plain weights is ahead. Both are kept: the plain weights are mapped
from the checkpoint, hence shared between processes and evictable, and only the packed copy is private.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops.linear.panels import Panels
from workers.ops.native.library import library

# 2 threads of an AVX-512 Xeon, all layers of a 135M model: ours takes 0.7x of F.linear's time at 16 rows, 0.75x at 64,
# 1.0x at 256 and 1.15x at 1024.
PANEL_ROWS = 256
# oneDNN's reordered weights, measured on AVX2: 1.7-2.0x at 4 rows, 1.2-1.5x at 16, 1.1x at 64, behind from 128 on.
REORDERED_ROWS = 64
TILE_ROWS = 32  # of the reordered weights when every row must be computed alike

Kernel = Callable[[Tensor], Tensor]


class Linear:
    """y = x Wᵀ + b in the weights' own dtype; exact. `deterministic`: see `make_linear`."""

    weight_format = "float32"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes
        self._plain_from, self._few_rows = _choose(weight, bias, deterministic)

    def __call__(self, x: Tensor) -> Tensor:
        if self._plain_from is not None and x.shape[0] >= self._plain_from:
            return F.linear(x, self.weight, self.bias)
        return self._few_rows(x)


class Bfloat16Linear:
    """y = x Wᵀ + b with W rounded to bfloat16 and x and all sums in float32.

    On a CPU with AMX, 16 rows and more are computed there with x as the sum of two bfloat16, which keeps 16 of its 24
    bits; not if `deterministic`.
    """

    weight_format = "bfloat16"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> None:
        self.num_bytes = weight.numel() * 2
        self._compute: Kernel
        if library() is not None:
            self._compute = Panels(
                weight, weight.shape[1], bias, "bfloat16", "bfloat16" if deterministic else "bfloat16_tiled"
            )
        else:
            self._compute = Linear(weight.bfloat16().float(), bias, deterministic)

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x)


def _choose(weight: Tensor, bias: Tensor | None, deterministic: bool) -> tuple[int | None, Kernel]:
    """From how many rows on F.linear computes (None: never), and what computes fewer."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        if library() is not None:
            return None if deterministic else PANEL_ROWS, Panels(weight, weight.shape[1], bias, "float32")
        if _can_reorder():
            reordered = torch.ops.mkldnn._reorder_linear_weight(weight, TILE_ROWS)
            if deterministic:
                return None, functools.partial(_in_tiles, reordered, bias)
            return REORDERED_ROWS, functools.partial(_reordered, reordered, bias)
    if deterministic:
        return None, functools.partial(_one_by_one, weight, bias)
    return 0, functools.partial(F.linear, weight=weight, bias=bias)


def _reordered(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _in_tiles(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Always calls of `TILE_ROWS` rows: in those, oneDNN computes every row by the same steps wherever it lies."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % TILE_ROWS))
    return torch.cat([_reordered(weight, bias, tile) for tile in torch.split(padded, TILE_ROWS)])[:rows]


def _one_by_one(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.cat([F.linear(row, weight, bias) for row in torch.split(x, 1)])


@functools.cache
def _can_reorder() -> bool:
    """Whether this torch has oneDNN's reordered form, by two private ops, and it computes what `F.linear` does."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        y = _reordered(torch.ops.mkldnn._reorder_linear_weight(weight, 16), None, x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(y, F.linear(x, weight))
