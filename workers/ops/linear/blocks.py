"""The block formats of GGUF files: quantizes float weights to the exact bytes of a file, and dequantizes them.

Knows formats; knows no kernel. A row of a matrix is divided into blocks of `BLOCK_COLUMNS`, each with its own scales.
"""

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

KINDS = {"q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0, "q4_1": Kind.Q4_1, "q4_k": Kind.Q4_K}
BLOCK_COLUMNS = {name: gguf.GGML_QUANT_SIZES[kind][0] for name, kind in KINDS.items()}
BLOCK_BYTES = {name: gguf.GGML_QUANT_SIZES[kind][1] for name, kind in KINDS.items()}


def quantize(weight: Tensor, weight_format: str) -> Tensor:
    """weight [out, in] as blocks [out, bytes] uint8; rows are padded with zeros to whole blocks."""
    padded = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK_COLUMNS[weight_format])).contiguous().numpy()
    if weight_format == "q4_k":
        return torch.from_numpy(_q4_k(padded))
    return torch.from_numpy(gguf.quants.quantize(padded, KINDS[weight_format]))


def dequantize(blocks: Tensor, weight_format: str) -> Tensor:
    """blocks [out, bytes] to float32 numbers [out, columns of the blocks]."""
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), KINDS[weight_format]))


def _q4_k(weight: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Scales from the range of the numbers; the gguf package cannot write this format."""
    parts = weight.reshape(-1, 8, 32)  # [blocks, 8 parts with a scale and a minimum, 32]
    low = np.minimum(parts.min(axis=2), 0)
    steps = np.stack([(parts.max(axis=2) - low) / 15, -low], axis=1)  # [blocks, scale|minimum, 8]
    units = (steps.max(axis=2, keepdims=True) / 63).astype(np.float16)  # [blocks, scale|minimum, 1]
    counts = np.clip(np.rint(_divided(steps, units.astype(np.float32))), 0, 63).astype(np.uint8)
    scale, minimum = np.swapaxes(units.astype(np.float32) * counts, 0, 1)  # [blocks, 8] each
    numbers = np.clip(np.rint(_divided(parts + minimum[..., None], scale[..., None])), 0, 15).astype(np.uint8)
    first, last = (
        counts[:, :, :4],
        counts[:, :, 4:],
    )  # six bits: the first four bytes hold the upper two bits of the last four
    packed = np.concatenate(
        [(first | (last >> 4) << 6).reshape(-1, 8), (last[:, 0] & 15) | (last[:, 1] & 15) << 4], axis=1
    )
    pairs = numbers.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate([units[..., 0].copy().view(np.uint8), packed, nibbles], axis=1)
    return blocks.reshape(weight.shape[0], -1)


def _divided(numbers: NDArray[np.float32], by: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.divide(numbers, by, out=np.zeros_like(numbers), where=by != 0)
