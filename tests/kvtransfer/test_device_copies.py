"""Ranges copied as rows are the bytes that plain copies would leave."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.backends import device_copies
from kvtransfer.backends.device_copies import FEW_RANGES, bytes_at, copy_ranges
from kvtransfer.copies import plan_copies
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Copies
from tests.kvtransfer.peers import ranges

UNITS = (1, 3, 4, 8, 24, 132, 256)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Copies, int]:
    """Disjoint ranges that are multiples of a unit, in any order, and the bytes of both pools."""
    unit = draw(st.sampled_from(UNITS))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4 * FEW_RANGES))
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    targets = np.cumsum(np.array(gaps) + lengths) - lengths
    num_units = int(targets[-1] + lengths[-1]) + draw(st.integers(0, 2))
    sources = [draw(st.integers(0, num_units - length)) for length in lengths]
    rows = draw(st.permutations(list(zip(sources, targets.tolist(), lengths, strict=True))))
    return ranges(*rows) * unit, num_units * unit + draw(st.integers(0, unit - 1))


def pools(num_bytes: int, misaligned: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(num_bytes)
    source, target = (random.integers(0, 255, num_bytes + misaligned, np.uint8)[misaligned:] for _ in range(2))
    return torch.from_numpy(source), torch.from_numpy(target)


def plainly(target: torch.Tensor, source: torch.Tensor, copies: Copies) -> torch.Tensor:
    expected = target.clone()
    for start, to, length in copies.tolist():
        expected[to : to + length] = source[start : start + length]
    return expected


@settings(deadline=None)
@given(plans(), st.integers(0, 8), st.sampled_from([64, 500, 1 << 20]))
def test_rows_land_where_plain_copies_do(plan: tuple[Copies, int], misaligned: int, staged_bytes: int) -> None:
    copies, num_bytes = plan
    source, target = pools(num_bytes, misaligned)
    expected = plainly(target, source, copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "STAGED_BYTES", staged_bytes + 300)  # room for a row
        copy_ranges(target, source, copies)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(("heads", "block_size"), [((0, 4), 16), ((4, 8), 16), ((0, 8), 32), ((0, 8), 24)])
def test_ranges_of_other_shards_and_block_sizes_land(heads: tuple[int, int], block_size: int) -> None:
    source = KVLayout("m", num_layers=3, num_kv_heads=8, head_dim=16, block_size=16, dtype="bfloat16", heads=heads)
    target = KVLayout("m", num_layers=3, num_kv_heads=8, head_dim=16, block_size=block_size, dtype="bfloat16")
    num_tokens = 40 * 16
    theirs, ours = (range(layout.blocks_for(num_tokens))[::-1] for layout in (source, target))
    copies = plan_copies(Piece(0, heads, (0, 3)), source, target, theirs, ours, 0, num_tokens)
    pool, arrived = pools(41 * source.block_bytes)[0], pools(41 * target.block_bytes)[1]
    expected = plainly(arrived, pool, copies)
    copy_ranges(arrived, pool, copies)
    assert len(copies) > FEW_RANGES
    assert torch.equal(arrived, expected)


def test_memory_at_an_address_is_used_without_a_copy() -> None:
    memory = np.zeros(64, np.uint8)
    bytes_at(memory.ctypes.data + 8, 16, "cpu").fill_(7)
    assert memory.tolist() == [0] * 8 + [7] * 16 + [0] * 40
