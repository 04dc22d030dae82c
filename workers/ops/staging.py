"""Moves small arrays to a device, and results from it, in one copy or one synchronization for all of them.

Copies go through pinned memory: from other memory, each one stalls the thread. A CPU needs no copies.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; for other addresses Triton compiles a kernel again


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, without waiting for it."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return views_of(staged(arrays, pin=device.type == "cuda").to(device, non_blocking=True), arrays)


def staged(arrays: Sequence[NDArray[Any]], *, pin: bool) -> Tensor:
    """The arrays in one buffer of bytes on the host, which `views_of` takes apart."""
    buffer = torch.empty(num_bytes(arrays), dtype=torch.uint8, pin_memory=pin)
    there = buffer.numpy()
    for start, array in zip(_starts(arrays), arrays, strict=False):
        there[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return buffer


def num_bytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Of the buffer that `staged` makes for them."""
    return _starts(arrays)[-1]


def views_of(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Tensors like the arrays in a buffer that was made by `staged`, or in a copy of it."""
    return [
        buffer[start : start + array.nbytes].view(_dtype(array.dtype)).view(array.shape)
        for start, array in zip(_starts(arrays), arrays, strict=False)
    ]


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Where each begins, and the end."""
    return list(itertools.accumulate((-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in arrays), initial=0))


@functools.cache
def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


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
