"""The quantised blocks of the GGUF file that a folder was converted from, as rows of bytes in the hub's order.

Knows the file's bytes by the folder's record; knows no names and no kernel. That the file is still the one that was
converted shows in samples: rows of blocks must stand for the very numbers in the folder.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.model.gguf_origin import Stored, read_origin
from workers.ops.linear import BLOCK_FORMATS
from workers.ops.linear.blocks import dequantise

logger = logging.getLogger(__name__)


class GGUFBlocks:
    """The mapped file of one converted folder. Raises `ModelError` when there is none, or it is another by now."""

    def __init__(self, folder: Path) -> None:
        origin = read_origin(folder)
        if origin is None:
            raise ModelError(
                f"engine.weights is gguf, but {folder} keeps no record of a GGUF file that it came from: "
                "name a .gguf file as the model, or take q8_0; if it was converted from one that is gone, remove the "
                "folder and pull again"
            )
        self._path = origin.path
        self._advice = f"name the .gguf file as the model, or remove {folder} and pull again"
        try:
            num_bytes = origin.path.stat().st_size
        except OSError as error:
            raise ModelError(
                f"engine.weights is gguf, but the file cannot be read ({error}); {self._advice}"
            ) from error
        if num_bytes != origin.num_bytes:
            raise self._changed(f"it has {num_bytes} bytes and had {origin.num_bytes}")
        self._tensors = origin.tensors
        self._mapped = torch.from_file(str(origin.path), shared=False, size=num_bytes, dtype=torch.uint8)

    def take(self, names: list[str], weight: Tensor) -> tuple[str, Tensor] | None:
        """The format and the blocks [out, bytes] of `weight` [out, in], which is the tensors `names` above one another.

        None when the file has them in a format without a kernel, or not all in the same.
        """
        stored = [self._tensors[name] for name in names]
        formats = {each.weight_format for each in stored}
        if len(formats) > 1 or not formats <= set(BLOCK_FORMATS):
            logger.debug("%s as %s: computed in float32", " + ".join(names), ", ".join(sorted(formats)))
            return None
        (weight_format,) = formats
        row_bytes = sum(each.num_bytes for each in stored) // weight.shape[0]
        blocks = torch.cat([self._rows(each, row_bytes) for each in stored])  # [out, bytes]
        samples = torch.tensor([0, weight.shape[0] // 2, weight.shape[0] - 1])
        if not torch.equal(dequantise(blocks[samples], weight_format), weight[samples]):
            raise self._changed(f"{names[0]} has other numbers")
        return weight_format, blocks

    def _rows(self, stored: Stored, row_bytes: int) -> Tensor:
        rows = self._mapped[stored.start : stored.start + stored.num_bytes].view(-1, row_bytes)
        if not stored.heads:
            return rows
        return rows.view(stored.heads, -1, 2, row_bytes).transpose(1, 2).reshape(-1, row_bytes)

    def _changed(self, how: str) -> ModelError:
        return ModelError(f"{self._path} is no longer the file that was converted: {how}; {self._advice}")
