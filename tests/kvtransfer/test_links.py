"""A rank's transports as a whole: choice, preflight, and pulls that are checked on arrival."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvtransfer.errors import DigestMismatch, PeerLost, PeerRefused, TransportUnavailable
from kvtransfer.layout import KVLayout
from kvtransfer.links import TransportSet
from kvtransfer.open import RESERVED_BLOCKS, SharedMemory
from kvtransfer.ticket import PeerAddress
from kvtransfer.transport import Region
from tests.kvtransfer.conftest import need
from tests.kvtransfer.peers import address_of, block_bytes_of, block_of, make_region, open_set, start_owner, whole_piece
from tests.kvtransfer.peers import checked_order as order

Two = tuple[TransportSet, Region, TransportSet, Region]


@pytest.fixture(params=["memory", "tcp"])
async def two(request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    """Owner and reader in this process: owner set, its region, connected reader set, its region."""
    shared, theirs, ours = SharedMemory(), make_region(filled=True), make_region()
    owner = open_set(theirs, (request.param,), "owner", shared=shared)
    reader = open_set(ours, (request.param,), "reader", shared=shared)
    await reader.connect(address_of(owner, "owner"))
    yield owner, theirs, reader, ours
    await reader.close()
    await owner.close()


async def test_a_pull_moves_and_checks_every_block(two: Two) -> None:
    _, theirs, reader, ours = two
    stats = await reader.pull(order(theirs, (4, 5, 9), (20, 21, 8))).done
    assert (stats.num_digests, stats.num_descriptors) == (3, 2)
    assert [block_of(ours, block) for block in (20, 21, 8)] == [block_bytes_of(block) for block in (4, 5, 9)]


async def test_a_changed_byte_is_a_digest_mismatch_that_names_the_block(two: Two) -> None:
    _, theirs, reader, _ = two
    wanted = order(theirs, (4, 5), (20, 21))
    theirs.bytes()[5 * theirs.layout.block_bytes + 3] ^= 1
    read = reader.pull(wanted)
    with pytest.raises(DigestMismatch, match=r"block 21 \(the owner's block 5, "):
        await read.done
    await read.settled


async def test_a_pull_without_digests_is_unchecked(two: Two) -> None:
    _, theirs, reader, _ = two
    stats = await reader.pull(replace(order(theirs, (4,), (20,)), digests=())).done
    assert stats.num_digests == 0


async def test_digests_for_other_blocks_are_refused(two: Two) -> None:
    _, theirs, reader, _ = two
    with pytest.raises(PeerRefused, match="digests"):
        await reader.pull(replace(order(theirs, (4, 5), (20, 21)), digests=((whole_piece(), (1,)),))).done


async def test_an_empty_pull_is_done_and_settled(two: Two) -> None:
    _, theirs, reader, _ = two
    read = reader.pull(order(theirs, (), ()))
    assert (await read.done).num_bytes == 0
    await read.settled


async def test_a_cancelled_pull_still_settles(two: Two) -> None:
    _, theirs, reader, _ = two
    read = reader.pull(order(theirs, (4,), (20,)))
    read.done.cancel()
    await read.settled


async def test_connecting_again_leaves_pulls_in_flight_alone(two: Two) -> None:
    owner, theirs, reader, _ = two
    pulls = [reader.pull(order(theirs, (4, 7), (20 + 2 * i, 30 + 2 * i))) for i in range(4)]
    again = asyncio.create_task(reader.connect(address_of(owner, "owner")))
    await asyncio.sleep(0)
    again.cancel()
    await asyncio.gather(*(read.done for read in pulls), reader.connect(address_of(owner, "owner")))
    reader.check()


async def test_a_forgotten_peer_is_lost(two: Two) -> None:
    _, theirs, reader, _ = two
    await reader.forget("owner")
    with pytest.raises(PeerLost):
        await reader.pull(order(theirs, (4,), (20,))).done


async def test_preflight_uses_only_the_reserved_blocks(two: Two) -> None:
    _, _, _, ours = two
    assert not any(ours.bytes()[RESERVED_BLOCKS * ours.layout.block_bytes :])


async def test_preflight_refuses_a_pool_whose_probe_block_is_not_this_incarnations(two: Two) -> None:
    owner, theirs, reader, _ = two
    await reader.forget("owner")
    theirs.bytes()[100] ^= 0xFF
    with pytest.raises(TransportUnavailable, match="probe block"):
        await reader.connect(address_of(owner, "owner"))


async def test_a_peer_of_another_model_is_refused(two: Two) -> None:
    _, _, reader, _ = two
    other = make_region(KVLayout("other", num_layers=4, num_kv_heads=2, head_dim=16, block_size=16))
    stranger = open_set(other, ("tcp",), "stranger")
    with pytest.raises(PeerRefused, match="same weights"):
        await reader.connect(address_of(stranger, "stranger"))
    await stranger.close()


async def test_a_wrong_secret_is_refused() -> None:
    owner = open_set(make_region(), ("tcp",), "owner", secret=b"another secret")
    reader = open_set(make_region(), ("tcp",), "reader")
    with pytest.raises(PeerRefused, match="secret"):
        await reader.connect(address_of(owner, "owner"))
    await reader.close()
    await owner.close()


async def test_an_empty_secret_does_not_start() -> None:
    with pytest.raises(ValueError, match="secret"):
        open_set(make_region(), ("tcp",), "owner", secret=b"")


async def test_a_path_that_does_not_work_falls_back_to_the_next() -> None:
    owner = open_set(make_region(), ("memory", "tcp"), "owner", shared=SharedMemory())
    reader = open_set(make_region(), ("memory", "tcp"), "reader", shared=SharedMemory())
    report = await reader.connect(address_of(owner, "owner"))
    assert (report.transport, report.owner) == ("tcp", "worker-owner")
    assert report.skipped[0].startswith("memory: owner/0 lives in another process")
    assert report.latency_s > 0 and report.bytes_per_s > 0
    await reader.close()
    await owner.close()


async def test_a_backend_that_cannot_work_here_is_left_out() -> None:
    opened = open_set(make_region(), ("memory", "tcp"), "alone")
    assert [name for name, _ in opened.shard().transports] == ["tcp"]
    await opened.close()


async def test_opening_nothing_that_works_raises() -> None:
    with pytest.raises(TransportUnavailable, match="memory"):
        open_set(make_region(), ("memory",), "alone")


async def test_a_restarted_worker_is_a_new_peer(two: Two) -> None:
    _, theirs, _, _ = two
    first = open_set(theirs, ("tcp",), "first-life")
    old = address_of(first, "first-life")
    stale = replace(old, incarnation="earlier-life")
    reader = open_set(make_region(), ("tcp",), "reader-2")
    with pytest.raises(PeerLost, match="another incarnation"):
        await reader.connect(stale)
    await reader.connect(old)
    await reader.close()
    await first.close()


async def test_nixl_and_tcp_between_two_processes_choose_nixl_over_cma() -> None:
    need("nixl")
    child, peer = await asyncio.to_thread(start_owner, "nixl", "owner-preferred")
    reader = open_set(make_region(), ("nixl", "tcp"), "reader")
    try:
        report = await reader.connect(peer)
        assert report.transport == "nixl" and "same host" in report.path
        assert "tcp" not in report.path
    finally:
        await reader.close()
        child.end()


async def test_nixl_refuses_another_host_without_a_fabric(nixl_owner: tuple[object, PeerAddress]) -> None:
    import msgspec

    from kvtransfer.backends.nixl_agent import NixlAddress

    peer = nixl_owner[1]
    address = NixlAddress.parse(dict(peer.shards[0].transports)["nixl"])
    elsewhere = msgspec.structs.replace(address, identity=replace(address.identity, boot_id="another-host"))
    shard = replace(peer.shards[0], transports=(("nixl", msgspec.msgpack.encode(elsewhere)),))
    reader = open_set(make_region(), ("nixl",), "reader")
    with pytest.raises(TransportUnavailable, match="another host"):
        await reader.connect(replace(peer, shards=(shard,)))
    await reader.close()
