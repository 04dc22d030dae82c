"""Copies byte ranges between two pieces of memory of one device, by torch.

Few or large ranges are copied one by one. Many small ones take longer to launch than to copy: they become rows of a
common length, gathered into a buffer and scattered from there. Works on a CPU's memory, too.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from kvtransfer.transport import Copies

FEW_RANGES = 8
LARGE_BYTES = 8 << 20  # of a range on average: above it a second pass over the bytes takes longer than the launches
STAGED_BYTES = 64 << 20  # of rows and their indices at once


class _GpuBytes:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def bytes_at(address: int, num_bytes: int, device: str) -> Tensor:
    """The device's memory at `address` as bytes, without a copy; the caller keeps it alive. Raises `ValueError`."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)
    memory = torch.as_tensor(_GpuBytes(address, num_bytes), device=device)
    if memory.data_ptr() != address:
        raise ValueError(f"the memory lies on another device than {device}")
    return memory


def copy_ranges(target: Tensor, source: Tensor, copies: Copies) -> None:
    """Queue the copies on the current stream. `target` and `source` are bytes; no two ranges share a target byte."""
    num_bytes = copies[:, 2]
    if len(copies) <= FEW_RANGES or num_bytes.sum() >= LARGE_BYTES * len(copies):
        for start, stop, length in copies.tolist():
            target[stop : stop + length].copy_(source[start : start + length], non_blocking=True)
        return
    unit = int(np.gcd.reduce(copies.reshape(-1)))
    targets, sources = _rows(target, source, unit)
    ends = np.cumsum(num_bytes // unit)  # rows up to and with each range
    firsts = ends - num_bytes // unit
    shifts = copies.T[:2] // unit - firsts  # [source | target, range]
    count = STAGED_BYTES // (unit + 2 * 8)
    for begin in range(0, int(ends[-1]), count):
        end = min(begin + count, int(ends[-1]))
        first, last = np.searchsorted(ends, (begin, end - 1), side="right")
        part = slice(first, last + 1)
        counts = np.minimum(ends[part], end) - np.maximum(firsts[part], begin)
        rows = np.repeat(shifts[:, part], counts, axis=1) + np.arange(begin, end)
        source_rows, target_rows = torch.from_numpy(rows).to(target.device, non_blocking=True)
        targets.index_copy_(0, target_rows, sources.index_select(0, source_rows))


def _rows(target: Tensor, source: Tensor, unit: int) -> list[Tensor]:
    """Both as rows of `unit` bytes, in numbers as wide as their alignment allows."""
    is_aligned = all(number % 8 == 0 for number in (unit, target.data_ptr(), source.data_ptr()))
    dtype = torch.int64 if is_aligned else torch.uint8
    return [each[: len(each) // unit * unit].view(dtype).view(-1, unit // dtype.itemsize) for each in (target, source)]
