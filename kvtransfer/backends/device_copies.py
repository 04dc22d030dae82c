"""Copies byte ranges between addresses of one device in one launch, by a Triton kernel.

Launching a copy takes longer than copying 2 MiB. A program copies a part of one range; programs beyond the end of a
shorter range do nothing, so ranges of many chunks are left to the caller. It takes addresses, since a peer's mapped
memory is no tensor of torch. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from kvtransfer.transport import Copies

CHUNK_BYTES = 64 << 10  # of a range that one program copies
THREADS = 256


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    target,
    source,
    ranges,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = ranges + 3 * tl.program_id(0).to(tl.int64)
    length = tl.multiple_of(tl.load(row + 2) // WIDTH, VECTOR)
    first = tl.program_id(1).to(tl.int64) * (STEP * STEPS)
    if first < length:
        theirs = tl.multiple_of(source.to(tl.pointer_type(DTYPE)), WIDTH * VECTOR)
        ours = tl.multiple_of(target.to(tl.pointer_type(DTYPE)), WIDTH * VECTOR)
        theirs += tl.multiple_of(tl.load(row) // WIDTH, VECTOR)
        ours += tl.multiple_of(tl.load(row + 1) // WIDTH, VECTOR)
        for number in range(tl.cdiv(tl.minimum(length - first, STEP * STEPS), STEP).to(tl.int32)):
            at = first + number * STEP + tl.arange(0, STEP)
            within = at < length
            tl.store(ours + at, tl.load(theirs + at, mask=within), mask=within)


def copy_ranges(target: int, source: int, copies: Copies, table: Tensor) -> None:
    """Queue the copies on the current stream.

    `target` and `source` are addresses; `table` holds `copies` on the device. No two ranges share a target byte.
    """
    chunks = -(-int(copies[:, 2].max()) // CHUNK_BYTES)
    _copy[len(copies), chunks](target, source, table, **variant(target, source, copies))


def variant(target: int, source: int, copies: Copies) -> dict[str, Any]:
    """The kernel's constants: numbers as wide as the alignment of all addresses and lengths allows."""
    aligned = int(np.bitwise_or.reduce(copies, axis=None)) | target | source
    dtype, width = (tl.int64, 8) if aligned % 16 == 0 else (tl.int32, 4) if aligned % 4 == 0 else (tl.uint8, 1)
    step = THREADS * {8: 8, 4: 8, 1: 4}[width]
    return {
        "DTYPE": dtype,
        "WIDTH": width,
        "VECTOR": 2 if width == 8 else 1,
        "STEP": step,
        "STEPS": CHUNK_BYTES // (step * width),
        "num_warps": THREADS // 32,
    }
