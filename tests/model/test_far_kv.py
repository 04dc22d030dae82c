"""KV pools of more than 2^31 numbers: Triton's kernels, in its interpreter, reach what lies behind. Of the memory, only
what is written takes any.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtransfer.digest import host_digests
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from tests.model.paging import ragged
from workers.ops.attention import REFERENCE, TRITON, TRITON_INVARIANT
from workers.ops.batch import Heads, Scoring
from workers.ops.narrow import to_slots

pytest.importorskip("triton")

from workers.ops import triton_delta, triton_fused
from workers.ops.triton_digest import cell_digests

SIZE, DIM, HEADS, LAYERS = 16, 64, 2, 2
BLOCK = HEADS * LAYERS * 2 * SIZE * DIM  # numbers
FAR = (1 << 31) // BLOCK + 1  # a block whose first number is beyond 2^31
NEAR_TABLE, FAR_TABLE = [3, 1, 2], [FAR + 3, FAR + 1, FAR + 2]


def pools(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A small pool, and the last blocks of a large one with the same numbers."""
    generator = torch.Generator().manual_seed(0)
    near = to_slots(torch.randn(4, HEADS, LAYERS, 2, SIZE, DIM, generator=generator), dtype)
    far = torch.empty(FAR + 4, *near.shape[1:], dtype=dtype)
    far[FAR:] = near
    return near, far


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_attention_reads_and_writes_far_blocks(dtype: torch.dtype) -> None:
    pair = pools(dtype)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(4, 2 * HEADS, DIM, generator=generator)
    key, value = torch.randn(2, 4, HEADS, DIM, generator=generator)
    for queries in ([4], [1]):
        rows = slice(queries[0])
        answers = []
        for table, pool in zip((NEAR_TABLE, FAR_TABLE), pair, strict=True):
            batch = ragged([table], queries, [40], SIZE)
            for backend in (REFERENCE, TRITON, TRITON_INVARIANT):
                backend.write_kv(pool, key[rows], value[rows], 1, batch.slot_mapping)
                answers.append(backend.attend(query[rows].to(torch.float32), pool, 1, batch, Scoring(0.125)))
        for answer in answers[1:]:
            torch.testing.assert_close(answer, answers[0], rtol=1e-3, atol=1e-3)
    assert torch.equal(pair[0].view(torch.uint8), pair[1][FAR:].view(torch.uint8))


@pytest.mark.full
def test_rotated_keys_reach_far_blocks() -> None:
    near, far = pools(torch.float16)
    qkv = torch.randn(3, 4 * HEADS, DIM, generator=torch.Generator().manual_seed(2)).half()
    angles = torch.ones(3, 1, DIM // 2).half()
    slots = torch.tensor([5, 17, 63])
    queries = [
        triton_fused.rotate_and_write(qkv, Heads((angles, angles)), pool, 1, slots + first * SIZE)
        for pool, first in ((near, 0), (far, FAR))
    ]
    assert torch.equal(*queries) and torch.equal(near, far[FAR:])


@pytest.mark.full
def test_digests_read_far_cells() -> None:
    layout = KVLayout("m", LAYERS, HEADS, DIM, SIZE, "int8")
    near, far = (pool.view(torch.uint8).view(-1) for pool in pools(torch.int8))
    first, box = len(far) // layout.block_bytes - 4, Piece(0, layout.heads, layout.layers)
    assert first * layout.block_bytes > 1 << 31
    wanted = host_digests(memoryview(near.numpy().data), layout, box, [[(2, 0, SIZE), (1, 3, 5)]])
    found = cell_digests(far, layout, box, [[(first + 2, 0, SIZE), (first + 1, 3, 5)]])
    assert np.array_equal(found.numpy().view(np.uint64), wanted)


@pytest.mark.full
def test_states_of_linear_attention_lie_in_far_blocks() -> None:
    dim, heads = 32, 2
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 5, heads, dim, generator=generator)
    a, b = torch.randn(2, 5, heads, generator=generator)
    rate, bias = -torch.rand(heads, generator=generator), torch.rand(heads, generator=generator)
    rows = (1 << 31) // (2 * 4096) + 1
    answers = []
    for first in (0, rows):
        states = torch.empty(first + 2, 2, 4096)
        states[first:] = 1.0
        batch = ragged([[first, first + 1]], [5], [SIZE + 2], SIZE)
        answer = triton_delta.gated_delta_rule(q, k, v, a, b, rate, bias, states, batch, SIZE)
        answers.append((answer, states[first:].clone()))
    for near, far in zip(*answers, strict=True):
        assert torch.equal(near, far) and torch.isfinite(near).all()
