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
from workers.model.folder import TensorEntry, read_header, weight_files
from workers.model.shard import Range

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # those of `folder.WEIGHT_DTYPES`


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a tensor with `height` rows."""

    name: str
    height: int
    rows: Range


class Weights:
    """Mapped safetensors files, by default a folder's model: a tensor is a view unless its dtype or device changes."""

    def __init__(
        self, path: Path, device: torch.device, dtype: torch.dtype, files: Sequence[Path] | None = None
    ) -> None:
        self._path = path
        self._device = device
        self._dtype = dtype
        self._tensors: dict[str, tuple[Tensor, TensorEntry]] = {}
        for file in files or weight_files(path):
            entries = read_header(file)
            mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
            self._tensors.update({entry.name: (mapped, entry) for entry in entries})

    def take(self, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        """The tensor or a part of it. Raises `ModelError` if a number is NaN or infinity.

        The result is dense: rows stay mapped, columns are copied.
        """
        mapped, entry = self._tensors[name]
        dtype = _DTYPES[entry.dtype]
        numbers = mapped[entry.start : entry.start + entry.num_bytes]
        if entry.start % dtype.itemsize:  # allowed by the format, but a view needs alignment
            numbers = numbers.clone()
        whole = numbers.view(dtype).view(entry.shape)
        part = whole if rows is None else whole[slice(*rows)]
        if columns is not None:
            part = part[:, slice(*columns)].contiguous()
        tensor = part.to(self._device, self._dtype)
        # The sum is finite if all numbers are; only otherwise check each number.
        if not math.isfinite(tensor.sum(dtype=torch.float32)) and not tensor.isfinite().all():
            raise ModelError(
                f"{self._path}: {name} holds NaN or infinity; the file is damaged or does not fit {self._dtype}"
            )
        return tensor


def fuse(parts: list[Tensor]) -> Tensor:
    """The tensors stacked. Neighbors in one mapped file become one view without a copy."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.data_ptr() != end:
            return torch.cat(parts)
        end += part.nbytes
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())
