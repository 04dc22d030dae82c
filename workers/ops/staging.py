"""Moves small arrays to a device, and results from it, in one copy or one synchronization for all of them.

Copies go through pinned memory: from other memory, each one stalls the thread. A CPU needs no copies.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; for other addresses Triton compiles a kernel again


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, without waiting for it."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors if device.type == "cpu" else packed(tensors, device)


def packed(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors as views of one buffer on the device."""
    sizes = [tensor.nbytes for tensor in tensors]
    starts = list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))

    def views(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
            for start, size, tensor in zip(starts, sizes, tensors, strict=False)
        ]

    staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, tensor in zip(views(staged), tensors, strict=True):
        view.copy_(tensor)
    return views(staged.to(device, non_blocking=True))


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host, after one wait for their device."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
