"""KV between workers that are sharded, cut into blocks and rounded in different ways, over every backend."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.copies import covering, union_of_pieces
from kvtransfer.digest import watch_reply
from kvtransfer.errors import DigestMismatch, PeerRefused, TransferTimeout
from kvtransfer.layout import KVLayout
from kvtransfer.open import SharedMemory, TransportSet
from kvtransfer.ticket import PeerAddress
from kvtransfer.transport import PullOrder, ReadStats
from tests.kvtransfer.conftest import need
from tests.kvtransfer.gangs import NUM_BLOCKS, NUM_TOKENS, Gang, blocks_of, own_gangs, truth
from tests.kvtransfer.grids import shards
from tests.kvtransfer.peers import Child, open_set, start
from workers.executor.kv_pool import _CONVERTED_BYTES, KVPool, allocate_pool
from workers.ops.narrow import from_slots, to_slots, torch_dtype

MODEL = KVLayout("odd", num_layers=4, num_kv_heads=3, head_dim=5, block_size=16)


@dataclass(frozen=True)
class Side:
    """How one worker holds the model's KV."""

    tensor: int
    pipeline: int
    block_size: int
    dtype: str = "float32"

    @property
    def ranks(self) -> tuple[KVLayout, ...]:
        return shards(replace(MODEL, block_size=self.block_size, dtype=self.dtype), self.tensor, self.pipeline)


OWNERS = {
    "2x1": Side(2, 1, 16),
    "1x3": Side(1, 3, 16),
    "5x1": Side(5, 1, 8, "bfloat16"),
    "2x2": Side(2, 2, 16),
    "3x2": Side(3, 2, 16, "int8"),
}
STAGING = 30_000  # bytes: a few blocks to a slot, so that an order needs several
CASES = {
    "another block size, recut": ("2x1", Side(1, 2, 24), 0),
    "another block size, staged": ("2x1", Side(1, 2, 24), STAGING),
    "smaller blocks, recut": ("1x3", Side(2, 1, 4), 0),
    "narrower, and another block size": ("2x1", Side(1, 2, 24, "bfloat16"), STAGING),
    "wider, from replicated heads": ("5x1", Side(2, 2, 8), STAGING),
    "to replicated heads": ("1x3", Side(4, 1, 16), 0),
    "in fp8": ("2x2", Side(1, 1, 16, "fp8"), STAGING),
    "with scales": ("1x3", Side(2, 1, 16, "int8"), STAGING),
    "with scales, on both sides": ("3x2", Side(2, 2, 16, "int8"), 0),
    "with scales, recut": ("3x2", Side(1, 2, 12, "int8"), 0),
    "with scales, staged": ("3x2", Side(5, 1, 24, "int8"), STAGING),
    "without their scales": ("3x2", Side(1, 1, 24, "bfloat16"), STAGING),
    "other quantized numbers": ("3x2", Side(2, 1, 12, "fp8"), STAGING),
    "half precision, to many ranks": ("1x3", Side(3, 2, 12, "float16"), STAGING),
}

Ask = Callable[..., Any]  # (verb, arguments) of a Gang


class Reader:
    """All ranks of a reader, and the owner that it reads from."""

    def __init__(self, backend: str, side: Side, staging_bytes: int, shared: SharedMemory, ask: Ask) -> None:
        self.side, self.ask = side, ask
        self.pools: list[KVPool] = []
        self.sets: list[TransportSet] = []
        for rank, layout in enumerate(side.ranks):
            pool = allocate_pool(layout, NUM_BLOCKS + 8, torch.device("cpu"), staging_bytes=staging_bytes)
            self.pools.append(pool)
            options = {"rank": rank, "shared": shared, "place": pool.place}
            self.sets.append(open_set(pool.region, (backend,), "reader", **options))
        count = -(-NUM_TOKENS // side.block_size)
        self.blocks = tuple(range(NUM_BLOCKS + 7, NUM_BLOCKS + 7 - count, -1))

    async def connect(self, peer: PeerAddress) -> None:
        self.peer = peer
        await asyncio.gather(*(opened.connect(peer) for opened in self.sets))

    def order(self, first_block: int, stop_block: int) -> PullOrder:
        """The owner's blocks first_block .. stop_block of the prompt, with what the owner says of them."""
        theirs = [shard.layout for shard in self.peer.shards]
        size = theirs[0].block_size
        blocks = blocks_of(theirs[0])[first_block:stop_block]
        pieces = union_of_pieces(tuple(theirs), tuple((layout, rank) for rank, layout in enumerate(self.side.ranks)))
        slots = tuple((b, min(size, NUM_TOKENS - i * size)) for i, b in enumerate(blocks, first_block))
        reply = watch_reply(self.ask("cells", slots), theirs, pieces, 0, len(blocks), finished=True, ttl_s=1.0)
        first, stop = first_block * size, min(stop_block * size, NUM_TOKENS)
        start, end = covering(self.side.block_size, first, stop - first)
        digests = tuple(zip(pieces, reply.digests, strict=True))
        return PullOrder(self.peer.incarnation, blocks, self.blocks[start:end], first, stop - first, digests, 10.0)

    async def pull(self, order: PullOrder) -> list[ReadStats]:
        """On all ranks; raises what the first of them raised, when all have settled."""
        reads = [opened.pull(order) for opened in self.sets]
        await asyncio.gather(*(read.settled for read in reads))
        return [await read.done for read in reads]

    def holds(self, rank: int) -> torch.Tensor:
        """[token, kv_head, layer, k|v, number]"""
        size = self.side.block_size
        blocks = self.pools[rank].blocks[list(self.blocks)].permute(0, 4, 1, 2, 3, 5)
        return blocks.reshape(len(self.blocks) * size, *blocks.shape[2:])[:NUM_TOKENS]

    def expected(self, rank: int) -> torch.Tensor:
        layout = self.side.ranks[rank]
        local = torch.from_numpy(truth(MODEL)[:, slice(*layout.heads), slice(*layout.layers)].copy())
        owner, ours = (torch_dtype(each.dtype) for each in (self.peer.shards[0].layout, layout))
        slots = to_slots(local, owner)
        return slots if owner == ours else to_slots(from_slots(slots, torch.float32), ours)

    async def close(self) -> None:
        for opened in self.sets:
            opened.check()
            await opened.close()


@pytest.fixture(scope="module")
def tcp_gangs() -> Iterator[tuple[Child, dict[str, PeerAddress]]]:
    yield from _gangs("tcp")


@pytest.fixture(scope="module")
def nixl_gangs() -> Iterator[tuple[Child, dict[str, PeerAddress]]]:
    need("nixl")
    yield from _gangs("nixl")


def _gangs(backend: str) -> Iterator[tuple[Child, dict[str, PeerAddress]]]:
    child = start(own_gangs, backend, {name: side.ranks for name, side in OWNERS.items()})
    yield child, child.receive()
    child.end()


Meet = Callable[[str, Side, int], Any]


@pytest.fixture(params=["memory", "tcp", "nixl"])
async def meet(request: pytest.FixtureRequest) -> AsyncIterator[Meet]:
    """Makes connected readers of an owner by its name; the owners of tcp and nixl live in a second process."""
    backend, shared = request.param, SharedMemory()
    made: list[Reader | Gang] = []

    async def make(owner: str, side: Side, staging_bytes: int) -> Reader:
        if backend == "memory":
            gang = Gang(backend, owner, OWNERS[owner].ranks, shared)
            made.append(gang)
            peer, ask = gang.address(), lambda verb, *arguments: getattr(gang, verb)(*arguments)
        else:
            child, peers = request.getfixturevalue(f"{backend}_gangs")
            peer, ask = peers[owner], lambda verb, *arguments: child.ask(owner, verb, *arguments)
        reader = Reader(backend, side, staging_bytes, shared, ask)
        made.append(reader)
        await reader.connect(peer)
        return reader

    yield make
    for each in reversed(made):
        await each.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_every_rank_gets_its_numbers_and_checks_them(meet: Meet, case: tuple[str, Side, int]) -> None:
    reader = await meet(*case)
    size = reader.peer.shards[0].layout.block_size
    total = -(-NUM_TOKENS // size)
    for first, stop in ((0, 1), (1, total - 1), (total - 1, total)):  # behind a watermark; may end inside our blocks
        stats = await reader.pull(reader.order(first, stop))
        assert all(each.num_digests > 0 and each.num_digests % (stop - first) == 0 for each in stats)
    for rank in range(len(reader.sets)):
        assert torch.equal(reader.holds(rank).view(torch.uint8), reader.expected(rank).view(torch.uint8))


async def test_ranks_of_a_pull_touch_no_other_block(meet: Meet) -> None:
    reader = await meet(*CASES["narrower, and another block size"])
    for pool in reader.pools:
        pool.blocks[:] = 7
    await reader.pull(reader.order(0, 6))
    for pool in reader.pools:
        idle = sorted(set(range(2, NUM_BLOCKS + 8)) - set(reader.blocks))
        assert (pool.blocks[idle] == 7).all()
        tail = NUM_TOKENS % reader.side.block_size
        assert (pool.blocks[reader.blocks[-1], :, :, :, tail:] == 7).all()


@pytest.mark.parametrize("name", ["another block size, recut", "narrower, and another block size"])
async def test_one_flipped_bit_is_detected(meet: Meet, name: str) -> None:
    reader = await meet(*CASES[name])
    order = reader.order(0, 6)
    reader.ask("damage", order.source_blocks[5])
    with pytest.raises(DigestMismatch, match=rf"the owner's block {order.source_blocks[5]}, "):
        await reader.pull(order)
    reader.ask("damage", order.source_blocks[5])
    await reader.pull(order)


@pytest.mark.parametrize("name", ["another block size, recut", "narrower, and another block size"])
async def test_two_swapped_blocks_are_detected(meet: Meet, name: str) -> None:
    reader = await meet(*CASES[name])
    order = reader.order(0, 6)
    reader.ask("swap", *order.source_blocks[:2])
    with pytest.raises(DigestMismatch, match=rf"the owner's block {order.source_blocks[0]}, "):
        await reader.pull(order)
    reader.ask("swap", *order.source_blocks[:2])


async def test_a_failed_piece_fails_the_pull_and_the_others_settle(meet: Meet) -> None:
    reader = await meet("2x1", Side(1, 1, 16), 0)
    order = reader.order(0, 6)
    (first, digests), *others = order.digests
    lies = (first, (digests[0] ^ 1, *digests[1:]))
    read = reader.sets[0].pull(replace(order, digests=(lies, *others)))
    with pytest.raises(DigestMismatch):
        await read.done
    await asyncio.wait_for(read.settled, 30.0)


async def test_pulls_that_share_a_staging_area_take_turns(meet: Meet) -> None:
    reader = await meet(*CASES["in fp8"])
    order = reader.order(0, 6)
    reads = [reader.sets[0].pull(order) for _ in range(6)]
    await asyncio.gather(*(read.done for read in reads))
    assert torch.equal(reader.holds(0).view(torch.uint8), reader.expected(0).view(torch.uint8))


async def test_without_room_a_staged_pull_times_out_and_settles(meet: Meet) -> None:
    reader = await meet(*CASES["in fp8"])
    slots = reader.sets[0]._piece_reader._slots
    taken = [slots.get_nowait() for _ in range(slots.qsize())]
    read = reader.sets[0].pull(replace(reader.order(0, 6), deadline_s=0.05))
    with pytest.raises(TransferTimeout, match=r"transfer\.staging_bytes"):
        await read.done
    await asyncio.wait_for(read.settled, 30.0)
    for offset in taken:
        slots.put_nowait(offset)


async def test_another_dtype_without_a_staging_area_is_refused_at_preflight(meet: Meet) -> None:
    with pytest.raises(PeerRefused, match=r"float32, ours bfloat16.*set transfer\.staging_bytes to \d+"):
        await meet("2x1", Side(1, 1, 16, "bfloat16"), 0)


async def test_the_staging_area_that_a_refusal_asks_for_is_enough(meet: Meet) -> None:
    with pytest.raises(PeerRefused) as refused:
        await meet("2x1", Side(1, 1, 16, "bfloat16"), 100)
    least = int(str(refused.value).split("staging_bytes to ")[1].split(",")[0])
    reader = await meet("2x1", Side(1, 1, 16, "bfloat16"), least)
    await reader.pull(reader.order(0, 6))
    assert torch.equal(reader.holds(0).view(torch.uint8), reader.expected(0).view(torch.uint8))


async def test_an_order_without_digests_of_our_piece_is_refused(meet: Meet) -> None:
    reader = await meet("2x1", Side(1, 2, 16), 0)
    order = reader.order(0, 2)
    with pytest.raises(PeerRefused, match="no digests"):
        await reader.pull(replace(order, digests=order.digests[:1]))


async def test_the_link_of_several_pieces_reports_its_slowest(meet: Meet) -> None:
    reader = await meet("2x1", Side(1, 1, 16), 0)
    report = await reader.sets[0].connect(reader.peer)
    assert report.owner == "worker-2x1"
    assert report.latency_s > 0 and report.bytes_per_s > 0
    assert " + " not in report.transport


@pytest.mark.parametrize("case", ["with scales, staged", "without their scales", "other quantized numbers"])
async def test_blocks_that_are_converted_together_are_those_converted_alone(
    meet: Meet, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU converts several at once."""
    monkeypatch.setitem(_CONVERTED_BYTES, "cpu", 20_000)
    reader = await meet(*CASES[case])
    await reader.pull(reader.order(0, 6))
    for rank in range(len(reader.sets)):
        assert torch.equal(reader.holds(rank).view(torch.uint8), reader.expected(rank).view(torch.uint8))


def test_numbers_beyond_a_narrow_range_become_its_largest() -> None:
    layout = replace(MODEL, block_size=2, dtype="float16")
    wide = replace(layout, dtype="float32")
    pool = allocate_pool(layout, 4, torch.device("cpu"), staging_bytes=wide.block_bytes)
    offset = pool.region.staging_offset
    pool.memory[offset:].view(torch.float32).fill_(1e6)
    pool.place(offset, wide, (3,), 0, 2)
    assert (pool.blocks[3].float() == 65504).all()
    assert np.array_equal(pool.blocks[:3].float(), np.zeros((3, *layout.shape)))
