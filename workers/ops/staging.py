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
    return views_of(staged(tensors, pin=device.type == "cuda").to(device, non_blocking=True), tensors)


def staged(tensors: Sequence[Tensor], *, pin: bool) -> Tensor:
    """Host tensors in one buffer of bytes, which `views_of` takes apart."""
    buffer = torch.empty(_starts(tensors)[-1], dtype=torch.uint8, pin_memory=pin)
    for view, tensor in zip(views_of(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def views_of(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these in a buffer that was made by `staged`, or in a copy of it."""
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(_starts(tensors), tensors, strict=False)
    ]


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Where each begins, and the end."""
    return list(itertools.accumulate((-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors), initial=0))


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
