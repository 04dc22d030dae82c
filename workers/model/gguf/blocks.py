"""The quantized blocks of the GGUF file that a folder was converted from, as rows of bytes in the hub's order.

Finds them by the folder's record; knows no kernel. A part of a matrix can be taken if its borders are borders of
blocks. Sampled rows are compared with the folder's numbers, to detect that the file has changed.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.model.gguf.origin import Stored, read_origin
from workers.model.shard import Range
from workers.model.weights import Part
from workers.ops.linear import BLOCK_FORMATS
from workers.ops.linear.blocks import BLOCK_BYTES, BLOCK_COLUMNS, dequantize

logger = logging.getLogger(__name__)


class GGUFBlocks:
    """The mapped file of one converted folder. Raises `ModelError` if there is none, or if it has changed."""

    def __init__(self, folder: Path) -> None:
        origin = read_origin(folder)
        if origin is None:
            raise ModelError(
                f"engine.weights is gguf, but {folder} has no record of a GGUF file that it was converted from: use a "
                ".gguf file as the model, or engine.weights q8_0; if the file was deleted, remove the folder and pull "
                "again"
            )
        self._path = origin.path
        self._advice = f"use the .gguf file as the model, or remove {folder} and pull again"
        try:
            num_bytes = origin.path.stat().st_size
        except OSError as error:
            raise ModelError(
                f"engine.weights is gguf, but the file cannot be read ({error}); {self._advice}"
            ) from error
        if num_bytes != origin.num_bytes:
            raise self._changed(f"it has {num_bytes} bytes, not {origin.num_bytes}")
        self._tensors = origin.tensors
        self._mapped = torch.from_file(str(origin.path), shared=False, size=num_bytes, dtype=torch.uint8)

    def take(self, parts: Sequence[Part], columns: Range, weight: Tensor) -> tuple[str, Tensor] | None:
        """The format and the blocks [out, bytes] of `weight` [out, in]: the stacked parts, restricted to the columns.

        None if their format has no kernel, they differ in format, or a border of the columns cuts a block.
        """
        stored = [self._tensors[part.name] for part in parts]
        formats = {each.weight_format for each in stored}
        names = " + ".join(part.name for part in parts)
        if len(formats) > 1 or not formats <= set(BLOCK_FORMATS):
            logger.debug("%s as %s: computed in float32", names, ", ".join(sorted(formats)))
            return None
        (weight_format,) = formats
        width, block_bytes = BLOCK_COLUMNS[weight_format], BLOCK_BYTES[weight_format]
        if any(border % width for border in columns):
            logger.debug("%s: columns %d to %d cut blocks of %d: computed in float32", names, *columns, width)
            return None
        cut = slice(*(border // width * block_bytes for border in columns))
        pieces = [self._rows(each, part)[:, cut] for each, part in zip(stored, parts, strict=True)]
        blocks = torch.cat(pieces)  # [out, bytes]
        samples = torch.tensor([0, weight.shape[0] // 2, weight.shape[0] - 1])
        if not torch.equal(dequantize(blocks[samples], weight_format), weight[samples]):
            raise self._changed(f"{parts[0].name} has different numbers")
        return weight_format, blocks

    def _rows(self, stored: Stored, part: Part) -> Tensor:
        """The part's rows, [rows, bytes]."""
        rows = self._mapped[stored.start : stored.start + stored.num_bytes].view(part.height, -1)
        if stored.heads:
            rows = rows.view(stored.heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(part.height, -1)
        return rows[slice(*part.rows)]

    def _changed(self, how: str) -> ModelError:
        return ModelError(f"{self._path} is no longer the file that was converted: {how}; {self._advice}")
