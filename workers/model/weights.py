"""The weights of one folder as tensors on the compute device.

Knows mapped safetensors files and dtypes. float32 checkpoints stay mapped on a CPU, so that all processes of a machine
share one copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.model.description import ModelConfig
from workers.model.folder import TensorEntry, parts_of, read_header, weight_files
from workers.model.shard import Range
from workers.model.tensors import FP8_BLOCK, FP8_SCALES

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a tensor with `height` rows."""

    name: str
    height: int
    rows: Range


class Weights:
    """Mapped safetensors files, by default a folder's model: a tensor is a view unless its dtype or device changes.

    `config`: of the model whose tensors these are, under the names that it has for them.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        files: Sequence[Path] | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        self._path = path
        self._device = device
        self._dtype = dtype
        self._tensors: dict[str, tuple[Tensor, TensorEntry]] = {}
        for file in files or weight_files(path):
            entries = [
                each
                for entry in read_header(file)
                for each in ((entry,) if config is None else parts_of(entry, config))
            ]
            mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
            self._tensors.update({entry.name: (mapped, entry) for entry in entries})

    def take(
        self,
        name: str,
        rows: Range | None = None,
        columns: Range | None = None,
        expert: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The tensor or a part of it. Raises `ModelError` if a number is NaN or infinity.

        The result is dense: rows stay mapped, columns are copied. `expert`: of a tensor of all experts, which may be
        stored as MXFP4. `dtype`: another than that of the folder's.
        """
        if name in self._tensors:
            whole = self._stored(name, expert)
        else:
            blocks, scales = (self._stored(f"{name}_{part}", expert).to(self._device) for part in ("blocks", "scales"))
            whole = from_mxfp4(blocks, scales).t().contiguous()
        part = whole if rows is None else whole[slice(*rows)]
        if part.dtype == torch.float8_e4m3fn:
            scales = self._stored(name + FP8_SCALES, None).to(self._device)
            part = from_fp8(part.to(self._device), scales, rows[0] if rows else 0)
        if columns is not None:
            part = part[:, slice(*columns)].contiguous()
        tensor = part.to(self._device, dtype or self._dtype)
        # The sum is finite if all numbers are; only otherwise check each number.
        if not math.isfinite(tensor.sum(dtype=torch.float32)) and not tensor.isfinite().all():
            raise ModelError(
                f"{self._path}: {name} holds NaN or infinity; the file is damaged or does not fit {self._dtype}"
            )
        return tensor

    def _stored(self, name: str, expert: int | None) -> Tensor:
        mapped, entry = self._tensors[name]
        dtype = _DTYPES[entry.dtype]
        numbers = mapped[entry.start : entry.start + entry.num_bytes]
        if entry.start % dtype.itemsize:  # allowed by the format, but a view needs alignment
            numbers = numbers.clone()
        whole = numbers.view(dtype).view(entry.shape)
        return whole if expert is None else whole[expert]


def from_fp8(numbers: Tensor, scales: Tensor, first: int = 0) -> Tensor:
    """float32 [rows, columns] of the numbers, times the scale of their block; `first`: the row of the first of them.

    `scales` has one for each `FP8_BLOCK` rows and columns of the whole matrix.
    """
    block = (torch.arange(len(numbers), device=numbers.device) + first) // FP8_BLOCK
    return numbers.float() * scales.float()[block].repeat_interleave(FP8_BLOCK, 1)[:, : numbers.shape[1]]


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [rows, blocks * 32] of blocks [rows, blocks, 16] and scales [rows, blocks], both uint8.

    Two numbers share a byte, the first in its low bits: a sign and one of eight sizes. A block's scale is
    2^(byte - 127), and NaN with 255. Source: Open Compute Project, Microscaling Formats v1.0 (2023).
    """
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=blocks.device)
    numbers = torch.cat([sizes, -sizes])[torch.stack([blocks & 15, blocks >> 4], -1).int()]  # [rows, blocks, 16, 2]
    scales = scales[..., None]
    return torch.ldexp(numbers.flatten(-2), scales.int() - 127).masked_fill(scales == 255, torch.nan).flatten(-2)


def halves(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] of which the last `rotary_dim` of each head rotate as pairs of neighbors, in the
    order of `rotate`: as pairs from both halves."""
    heads = torch.unflatten(rows, 0, (-1, head_dim))
    pairs = torch.unflatten(heads[:, head_dim - rotary_dim :], 1, (-1, 2))
    return torch.cat([heads[:, : head_dim - rotary_dim], pairs[:, :, 0], pairs[:, :, 1]], dim=1).flatten(0, 1)


def fuse(parts: list[Tensor]) -> Tensor:
    """The tensors stacked. Neighbors in one mapped file become one view without a copy."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.data_ptr() != end:
            return torch.cat(parts)
        end += part.nbytes
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())
