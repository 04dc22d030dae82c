"""Digests made by the Triton kernel are those of xxhash, bit for bit; here in Triton's interpreter."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.digest import combine, digest_cells, host_digests
from kvtransfer.errors import DigestMismatch, TransportUnavailable
from kvtransfer.layout import DTYPE_BYTES, LATENT_ORDER, ORDER, KVLayout
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import Piece
from kvtransfer.transport import PullOrder, Span
from tests.examples import examples
from tests.kvtransfer.peers import address_of, checked_order, open_set
from workers.executor.kv_pool import KVPool, allocate_pool

pytest.importorskip("triton")

from workers.executor.kv_pool import DevicePool
from workers.executor.rank import _digests
from workers.ops.triton_digest import cell_digests

DEVICE = torch.device(os.environ.get("DIPTYCH_TEST_DEVICE", "cpu"))
BLOCKS = 5


@st.composite
def cells(draw: st.DrawFn) -> tuple[KVLayout, Piece, list[list[Span]]]:
    """A layout, a box of it, and cells whose tokens lie in one to three blocks."""
    dim, dtype = draw(st.sampled_from([1, 3, 6, 16, 64, 128])), draw(st.sampled_from(list(DTYPE_BYTES)))
    size = draw(st.sampled_from([1, 5, 16, 40]))
    layers, heads = sorted(draw(st.permutations(range(6)))[:2]), sorted(draw(st.permutations(range(1000)))[:2])
    layout = KVLayout("m", 6, 1000, dim, size, dtype, (layers[0], layers[1]), (heads[0], min(heads[0] + 2, heads[1])))
    layout = replace(layout, order=draw(st.sampled_from([ORDER, LATENT_ORDER])))
    head = draw(st.integers(*layout.heads).filter(lambda head: head < layout.heads[1]))
    layer = draw(st.integers(*layout.layers).filter(lambda layer: layer < layout.layers[1]))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        blocks = draw(st.permutations(range(BLOCKS)))[: draw(st.integers(1, 3))]
        spans = []
        for block in blocks:
            first = draw(st.integers(0, size - 1))
            spans.append((block, first, draw(st.integers(1, size - first))))
        rows.append(spans)
    return layout, Piece(0, (head, head + 1), (layer, layer + 1)), rows


@examples(30)
@given(cells(), st.integers(0, 2**16))
def test_digests_are_those_of_the_host(case: tuple[KVLayout, Piece, list[list[Span]]], seed: int) -> None:
    layout, box, rows = case
    pool = torch.randint(
        0, 256, (BLOCKS * layout.block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    expected = host_digests(memoryview(pool.numpy().data), layout, box, rows)
    found = cell_digests(pool.to(DEVICE), layout, box, rows).cpu().numpy().view(np.uint64)
    assert np.array_equal(found, expected)


def test_no_rows_have_no_digests() -> None:
    layout = KVLayout("m", 2, 2, 8, 4)
    assert cell_digests(torch.zeros(layout.block_bytes), layout, Piece(0, (0, 2), (0, 1)), []).shape == (0, 2, 1)


LAYOUT = KVLayout("m", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16)


def pool_on_device(staging_bytes: int = 0) -> KVPool:
    """A pool whose bytes are reached as on a GPU."""
    pool = allocate_pool(LAYOUT, 8, DEVICE, staging_bytes=staging_bytes)
    pool.memory.random_(0, 256)
    return replace(pool, region=replace(pool.region, device_bytes=DevicePool(pool.memory, pool.side_stream)))


def test_an_owner_digests_its_blocks_on_the_device() -> None:
    pool = pool_on_device()
    host = replace(pool.region, device_bytes=None)
    blocks = ((3, 16), (7, 5), (2, 1))
    assert _digests(pool, blocks) == digest_cells(pool.region, blocks) == digest_cells(host, blocks)
    assert _digests(pool, ()) == ()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the memory backend copies host memory")
async def test_a_reader_checks_on_the_device_what_arrived() -> None:
    """The owner's pool lies on the host, so their digests must agree; probe blocks go through the device too."""
    shared, owner, reader = SharedMemory(), allocate_pool(LAYOUT, 8, torch.device("cpu")), pool_on_device()
    theirs = open_set(owner.region, ("memory",), "owner", shared=shared)
    ours = open_set(reader.region, ("memory",), "reader", shared=shared)
    await ours.connect(address_of(theirs, "owner"))
    owner.memory.random_(0, 256)
    order = checked_order(owner.region, (4, 6), (7, 3))
    stats = await ours.pull(order).done
    arrived, sent = reader.blocks[[7, 3]].view(torch.uint8), owner.blocks[[4, 6]].view(torch.uint8)
    assert stats.num_digests == 2 and torch.equal(arrived, sent)
    owner.memory[6 * LAYOUT.block_bytes + 1] ^= 1
    with pytest.raises(DigestMismatch, match=r"block 3 \(the owner's block 6, "):
        await ours.pull(order).done
    with pytest.raises(TransportUnavailable, match="the probe block of owner/0 arrived with other bytes"):
        await ours.connect(address_of(theirs, "owner"))  # its stamp was overwritten
    await ours.close()
    await theirs.close()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the memory backend copies host memory")
async def test_a_reader_converts_what_it_has_checked_on_the_device() -> None:
    shared, wide = SharedMemory(), replace(LAYOUT, dtype="bfloat16", block_size=24)
    owner = allocate_pool(wide, 8, torch.device("cpu"))
    owner.blocks.normal_()
    reader = pool_on_device(staging_bytes=3 * wide.block_bytes)  # a slot holds one block
    theirs = open_set(owner.region, ("memory",), "owner", shared=shared)
    ours = open_set(reader.region, ("memory",), "reader", shared=shared, place=reader.place)
    await ours.connect(address_of(theirs, "owner"))
    piece, blocks, tokens = Piece(0, wide.heads, wide.layers), (4, 6), 40
    digests = combine(digest_cells(owner.region, ((4, 24), (6, 16))), wide, piece)
    order = PullOrder("owner", blocks, (7, 3, 5), 0, tokens, ((piece, digests),), 10.0)
    assert (await ours.pull(order).done).num_digests == 2
    sent, arrived = (
        torch.cat([pool.blocks[block] for block in places], dim=3)[:, :, :, :tokens]
        for pool, places in ((owner, blocks), (reader, (7, 3, 5)))
    )
    assert torch.equal(arrived, sent.float())
    owner.memory[6 * wide.block_bytes] ^= 1
    with pytest.raises(DigestMismatch, match="the owner's block 6, "):
        await ours.pull(order).done
    await ours.close()
    await theirs.close()
