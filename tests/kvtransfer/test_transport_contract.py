"""The contract of every transport that moves bytes; all but memory read from a second process."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from kvtransfer.errors import PeerLost, PeerRefused, TransferError
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import PeerAddress, rank_name
from kvtransfer.transport import Copies, Region, Transport
from tests.kvtransfer.peers import (
    LAYOUT,
    NUM_BLOCKS,
    address_of,
    block_bytes_of,
    block_of,
    make_region,
    open_set,
    ranges,
    whole_blocks,
)

SIZE = LAYOUT.block_bytes


@dataclass
class Pair:
    region: Region
    transport: Transport
    peer: PeerAddress

    def read(self, copies: Copies, peer: str | None = None):
        return self.transport.read(peer or self.name, copies, deadline_s=10)

    @property
    def name(self) -> str:
        return rank_name(self.peer.incarnation, 0)

    async def connect(self) -> str:
        return await self.transport.connect(self.name, self.peer.shards[0], deadline_s=10)


@pytest.fixture(params=["memory", "tcp", "nixl", "cuda_ipc"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    backend, shared, region = request.param, SharedMemory(), make_region()
    if backend == "memory":
        owner = open_set(make_region(filled=True), (backend,), "owner-memory", shared=shared)
        peer = address_of(owner, "owner-memory")
    else:
        _, peer = request.getfixturevalue(f"{backend}_owner")
    opened = open_set(region, (backend,), "reader", shared=shared)
    made = Pair(region, opened._transports[0], peer)
    await made.connect()
    yield made
    await opened.close()


async def test_scattered_blocks_arrive_byte_for_byte(pair: Pair) -> None:
    pairs = ((9, 3), (2, 40), (33, 12), (8, 4))
    stats = await pair.read(whole_blocks(*pairs)).done
    assert (stats.num_bytes, stats.num_descriptors) == (4 * SIZE, 4)
    for source, target in pairs:
        assert block_of(pair.region, target) == block_bytes_of(source)


async def test_a_read_touches_nothing_but_its_targets(pair: Pair) -> None:
    before = [block_of(pair.region, block) for block in range(NUM_BLOCKS)]
    read = pair.read(whole_blocks((5, 20)))
    await read.done
    await read.settled
    untouched = [block for block in range(NUM_BLOCKS) if block != 20]
    assert all(block_of(pair.region, block) == before[block] for block in untouched)


async def test_one_long_range_over_many_blocks_arrives(pair: Pair) -> None:
    await pair.read(ranges((4 * SIZE, 30 * SIZE, 16 * SIZE))).done
    assert all(block_of(pair.region, 30 + i) == block_bytes_of(4 + i) for i in range(16))


async def test_odd_ranges_inside_blocks_arrive(pair: Pair) -> None:
    await pair.read(ranges((3 * SIZE + 11, 7 * SIZE + 5, 1234), (9 * SIZE + 1, 50 * SIZE, 1))).done
    assert bytes(pair.region.bytes(7 * SIZE + 5, 1234)) == block_bytes_of(3)[11 : 11 + 1234]
    assert pair.region.bytes(50 * SIZE, 1)[0] == block_bytes_of(9)[1]


async def test_no_copies_are_done_at_once(pair: Pair) -> None:
    read = pair.read(ranges())
    assert (await read.done).num_bytes == 0
    await read.settled


async def test_two_reads_at_once_both_arrive(pair: Pair) -> None:
    first, second = pair.read(whole_blocks((2, 10), (3, 11))), pair.read(whole_blocks((4, 12), (5, 13)))
    await asyncio.gather(first.done, second.done, first.settled, second.settled)
    assert [block_of(pair.region, 10 + i) for i in range(4)] == [block_bytes_of(2 + i) for i in range(4)]


async def test_a_range_outside_the_owners_pool_is_refused(pair: Pair) -> None:
    read = pair.read(ranges(((NUM_BLOCKS - 1) * SIZE + 1, 3 * SIZE, SIZE)))
    with pytest.raises(PeerRefused):
        await read.done
    await read.settled


async def test_a_range_outside_our_pool_is_refused(pair: Pair) -> None:
    read = pair.read(ranges((0, NUM_BLOCKS * SIZE - 1, 2)))
    with pytest.raises(ValueError, match="outside"):
        await read.done
    await read.settled


async def test_a_refused_read_leaves_the_peer_usable(pair: Pair) -> None:
    with pytest.raises(PeerRefused):
        await pair.read(ranges((NUM_BLOCKS * SIZE, 0, SIZE))).done
    await pair.read(whole_blocks((6, 6))).done
    assert block_of(pair.region, 6) == block_bytes_of(6)


async def test_an_unknown_peer_is_lost(pair: Pair) -> None:
    read = pair.read(whole_blocks((2, 2)), peer="nobody")
    with pytest.raises(PeerLost, match="not connected"):
        await read.done
    await read.settled


async def test_a_forgotten_peer_is_lost_until_it_is_connected_again(pair: Pair) -> None:
    await pair.transport.forget(pair.name)
    with pytest.raises(PeerLost):
        await pair.read(whole_blocks((2, 2))).done
    await pair.connect()
    await pair.read(whole_blocks((2, 2))).done
    assert block_of(pair.region, 2) == block_bytes_of(2)


async def test_connecting_twice_is_harmless(pair: Pair) -> None:
    assert await pair.connect() == await pair.connect()
    await pair.read(whole_blocks((2, 2))).done


async def test_every_read_has_settled_when_close_returns(pair: Pair) -> None:
    reads = [pair.read(whole_blocks((2 + i, 20 + i))) for i in range(8)]
    await pair.transport.close()
    await asyncio.sleep(0)
    assert all(read.done.done() and read.settled.done() for read in reads)


async def test_a_closed_transport_loses_reads_and_forgets_at_once(pair: Pair) -> None:
    await pair.transport.close()
    read = pair.read(whole_blocks((2, 2)))
    with pytest.raises(PeerLost):
        await asyncio.wait_for(read.done, 30.0)
    await asyncio.wait_for(read.settled, 30.0)
    await asyncio.wait_for(pair.transport.forget(pair.name), 30.0)
    await asyncio.wait_for(pair.transport.close(), 30.0)


async def test_an_address_that_is_garbage_is_refused(pair: Pair) -> None:
    garbage = replace(pair.peer.shards[0], transports=((pair.transport.name, b"\xff" * 40),))
    with pytest.raises(TransferError):
        await pair.transport.connect("garbage", garbage, deadline_s=2)
