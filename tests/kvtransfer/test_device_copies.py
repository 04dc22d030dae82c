"""The kernel leaves the bytes that plain copies would leave, in Triton's interpreter; and it compiles for a GPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import torch

from kvtransfer.backends.device_copies import CHUNK_BYTES, copy_ranges, variant
from kvtransfer.copies import plan_copies
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Copies
from tests.kvtransfer.peers import ranges

UNITS = (1, 3, 4, 8, 16, 132, 256, CHUNK_BYTES // 2 - 4)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Copies, int]:
    """Disjoint ranges that are multiples of a unit, in any order, and the bytes of both pools."""
    unit = draw(st.sampled_from(UNITS))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    targets = np.cumsum(np.array(gaps) + lengths) - lengths
    num_units = int(targets[-1] + lengths[-1]) + draw(st.integers(0, 2))
    sources = [draw(st.integers(0, num_units - length)) for length in lengths]
    rows = draw(st.permutations(list(zip(sources, targets.tolist(), lengths, strict=True))))
    return ranges(*rows) * unit, num_units * unit + draw(st.integers(0, unit - 1))


def check(copies: Copies, source_bytes: int, target_bytes: int, misaligned: int = 0) -> None:
    random = np.random.default_rng(source_bytes)
    source, target = (
        random.integers(0, 255, size + misaligned, np.uint8)[misaligned:] for size in (source_bytes, target_bytes)
    )
    expected = target.copy()
    for start, to, length in copies.tolist():
        expected[to : to + length] = source[start : start + length]
    copy_ranges(target.ctypes.data, source.ctypes.data, copies, torch.from_numpy(copies.copy()))
    assert np.array_equal(target, expected)


@settings(deadline=None, max_examples=40)
@given(plans(), st.sampled_from([0, 1, 4, 8]))
def test_ranges_land_where_plain_copies_do(plan: tuple[Copies, int], misaligned: int) -> None:
    copies, num_bytes = plan
    check(copies, num_bytes, num_bytes, misaligned)


@pytest.mark.parametrize(("heads", "block_size"), [((0, 4), 16), ((4, 8), 16), ((0, 8), 32), ((0, 8), 24)])
def test_ranges_of_other_shards_and_block_sizes_land(heads: tuple[int, int], block_size: int) -> None:
    source = KVLayout("m", num_layers=2, num_kv_heads=8, head_dim=16, block_size=16, dtype="bfloat16", heads=heads)
    target = KVLayout("m", num_layers=2, num_kv_heads=8, head_dim=16, block_size=block_size, dtype="bfloat16")
    num_tokens = 96
    theirs, ours = (range(layout.blocks_for(num_tokens))[::-1] for layout in (source, target))
    copies = plan_copies(Piece(0, heads, (0, 2)), source, target, theirs, ours, 0, num_tokens)
    assert variant(0, 0, copies)["VECTOR"] == 2, "KV of the usual layouts moves 16 bytes at a time"
    check(copies, 6 * source.block_bytes, len(ours) * target.block_bytes)


COMPILE = """
import re
import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtransfer.backends.device_copies import _copy, variant
for aligned, wide in ((16, "global.v2.b64"), (4, "global.b32"), (1, "global.b8")):
    fixed = variant(0, 0, np.array([[0, 0, aligned]]))
    warps = fixed.pop("num_warps")
    kinds = {"target": "i64", "source": "i64", "ranges": "*i64"} | dict.fromkeys(fixed, "constexpr")
    source, target = ASTSource(_copy, kinds, fixed), GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps})
    assert made.asm["cubin"]
    assert "ld." + wide in made.asm["ptx"] and "st." + wide in made.asm["ptx"], made.asm["ptx"]
"""


@pytest.mark.full
def test_the_kernel_compiles_for_a_gpu_with_wide_loads_and_stores() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
