"""What is CUDA IPC's own: which owners it refuses, and what it maps and unmaps; over shared pages, without a GPU."""

import asyncio
import threading
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import msgspec
import pytest

from kvtransfer.backends import cuda_ipc
from kvtransfer.backends.cuda_ipc import CudaIpcTransport, IpcAddress
from kvtransfer.errors import PeerLost, TransferError, TransferTimeout, TransportUnavailable
from kvtransfer.host import ProcessWatch, host_identity
from kvtransfer.links import TransportSet
from kvtransfer.open import open_transports
from kvtransfer.ticket import PeerAddress, ShardAddress
from kvtransfer.transport import Copies
from tests.kvtransfer.pages_driver import PagesDriver
from tests.kvtransfer.peers import (
    SECRET,
    Child,
    address_of,
    block_bytes_of,
    block_of,
    make_region,
    open_set,
    start_owner,
    whole_blocks,
)

OWNER = "owner-cuda-ipc/0"


def opened_reader() -> tuple[TransportSet, CudaIpcTransport]:
    opened = open_set(make_region(), ("cuda_ipc",), "reader")
    transport = opened._transports[0]
    assert isinstance(transport, CudaIpcTransport)
    return opened, transport


def changed(peer: PeerAddress, **fields: Any) -> ShardAddress:
    """The owner's address with other contents."""
    shard = peer.shards[0]
    address = msgspec.structs.replace(IpcAddress.parse(dict(shard.transports)["cuda_ipc"]), **fields)
    return replace(shard, transports=(("cuda_ipc", msgspec.msgpack.encode(address)),))


@pytest.mark.parametrize(
    ("elsewhere", "reason"),
    [({"boot_id": "another"}, "another host"), ({"pid_namespace": "pid:[1]"}, "another pid namespace")],
)
async def test_an_owner_elsewhere_is_refused(
    cuda_ipc_owner: tuple[Child, PeerAddress], elsewhere: dict[str, Any], reason: str
) -> None:
    reader, transport = opened_reader()
    shard = changed(cuda_ipc_owner[1], identity=replace(host_identity(), **elsewhere))
    with pytest.raises(TransportUnavailable, match=reason):
        await transport.connect(OWNER, shard, deadline_s=5)
    await reader.close()


async def test_an_owner_in_the_same_process_is_refused() -> None:
    reader, transport = opened_reader()
    owner, _ = opened_reader()
    with pytest.raises(TransportUnavailable, match="same process"):
        await transport.connect("owner/0", address_of(owner, "owner").shards[0], deadline_s=5)
    await reader.close()
    await owner.close()


async def test_a_handle_that_does_not_open_is_an_error_and_leaves_no_peer(
    cuda_ipc_owner: tuple[Child, PeerAddress],
) -> None:
    reader, transport = opened_reader()
    shard = changed(cuda_ipc_owner[1], handle=msgspec.msgpack.encode((cuda_ipc_owner[0].pid, 10_000)))
    with pytest.raises(TransferError, match="CUDA failed"):
        await transport.connect(OWNER, shard, deadline_s=5)
    with pytest.raises(PeerLost, match="not connected"):
        await transport.read(OWNER, whole_blocks((2, 2)), deadline_s=5).done
    await reader.close()


async def test_a_later_process_with_the_owners_pid_is_not_the_owner(cuda_ipc_owner: tuple[Child, PeerAddress]) -> None:
    reader, transport = opened_reader()
    with pytest.raises(PeerLost, match="is gone"):
        await transport.connect(OWNER, changed(cuda_ipc_owner[1], started="1"), deadline_s=5)
    await reader.close()


async def test_bytes_of_an_owner_that_ended_during_the_copy_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    child, peer = await asyncio.to_thread(start_owner, "cuda_ipc", "owner-cuda-ipc")
    reader, transport = opened_reader()
    await transport.connect(OWNER, peer.shards[0], deadline_s=5)
    copy = PagesDriver.copy

    def copy_and_kill(driver: PagesDriver, mapping: Any, copies: Copies) -> None:
        copy(driver, mapping, copies)
        child.end()

    monkeypatch.setattr(PagesDriver, "copy", copy_and_kill)
    read = transport.read(OWNER, whole_blocks((2, 2)), deadline_s=5)
    with pytest.raises(PeerLost, match="is gone"):
        await read.done
    await asyncio.wait_for(read.settled, 30.0)
    driver = transport._driver
    assert isinstance(driver, PagesDriver) and driver.num_mapped == 0, "a mapping keeps its memory allocated"
    await reader.close()


async def test_a_copy_past_its_deadline_settles_when_it_ends_and_those_behind_it_never_begin(
    cuda_ipc_owner: tuple[Child, PeerAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, transport = opened_reader()
    await transport.connect(OWNER, cuda_ipc_owner[1].shards[0], deadline_s=5)
    may_end, copy = threading.Event(), PagesDriver.copy

    def slow_copy(*arguments: Any) -> None:
        assert may_end.wait(60)
        copy(*arguments)

    monkeypatch.setattr(PagesDriver, "copy", slow_copy)
    first = transport.read(OWNER, whole_blocks((2, 20)), deadline_s=0.1)
    second = transport.read(OWNER, whole_blocks((3, 21)), deadline_s=0.1)
    for each in (first, second):
        with pytest.raises(TransferTimeout):
            await each.done
    await asyncio.wait_for(second.settled, 30.0)
    assert not first.settled.done()
    forgetting = asyncio.ensure_future(transport.forget(OWNER))
    await asyncio.sleep(0.05)
    assert not forgetting.done(), "the owner was unmapped under a copy"
    may_end.set()
    await asyncio.wait_for(first.settled, 30.0)
    await forgetting
    assert block_of(transport._region, 20) == block_bytes_of(2)
    assert block_of(transport._region, 21) == bytes(len(block_bytes_of(3)))
    await reader.close()


async def test_closing_under_a_copy_that_does_not_end_is_an_error_in_time(
    cuda_ipc_owner: tuple[Child, PeerAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "CLOSE_S", 0.1)
    reader, transport = opened_reader()
    await transport.connect(OWNER, cuda_ipc_owner[1].shards[0], deadline_s=5)
    may_end = threading.Event()
    monkeypatch.setattr(PagesDriver, "copy", lambda *_: may_end.wait(60))
    read = transport.read(OWNER, whole_blocks((2, 20)), deadline_s=0.1)
    with pytest.raises(TransferTimeout):
        await read.done
    with pytest.raises(TransferTimeout, match="has not ended within"):
        await transport.close()
    may_end.set()
    monkeypatch.setattr(cuda_ipc, "CLOSE_S", 30.0)
    await reader.close()


async def test_forgetting_an_owner_under_a_copy_that_does_not_end_is_an_error_in_time_and_unmaps_it_later(
    cuda_ipc_owner: tuple[Child, PeerAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, transport = opened_reader()
    await transport.connect(OWNER, cuda_ipc_owner[1].shards[0], deadline_s=5)
    has_begun, may_end = threading.Event(), threading.Event()

    def slow_copy(*_: Any) -> None:
        has_begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(PagesDriver, "copy", slow_copy)
    read = transport.read(OWNER, whole_blocks((2, 20)), deadline_s=30)
    assert await asyncio.to_thread(has_begun.wait, 30)
    monkeypatch.setattr(cuda_ipc, "CLOSE_S", 0.1)
    with pytest.raises(TransferTimeout, match="has not ended within"):
        await transport.forget(OWNER)
    with pytest.raises(PeerLost, match="was dropped"):
        await read.done
    driver = transport._driver
    assert isinstance(driver, PagesDriver) and driver.num_mapped == 1
    may_end.set()
    monkeypatch.setattr(cuda_ipc, "CLOSE_S", 30.0)
    await asyncio.wait_for(read.settled, 30.0)
    await transport.forget("another/0")  # in the thread's order
    assert driver.num_mapped == 0
    await reader.close()


def test_a_driver_that_does_not_load_makes_the_backend_unavailable_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(cuda_ipc, "OPEN_S", 0.1)
    monkeypatch.setattr(cuda_ipc, "open_driver", lambda _: may_end.wait(60))
    with pytest.raises(TransportUnavailable, match="has not started within"):
        CudaIpcTransport(make_region(), identity=host_identity())
    may_end.set()


async def test_an_owner_is_mapped_once_and_unmapped_when_forgotten(cuda_ipc_owner: tuple[Child, PeerAddress]) -> None:
    reader, transport = opened_reader()
    driver = transport._driver
    assert isinstance(driver, PagesDriver)
    for _ in range(3):
        await transport.connect(OWNER, cuda_ipc_owner[1].shards[0], deadline_s=5)
    assert driver.num_mapped == 1
    await transport.forget(OWNER)
    assert driver.num_mapped == 0
    await transport.connect(OWNER, cuda_ipc_owner[1].shards[0], deadline_s=5)
    await reader.close()
    assert driver.num_mapped == 0


def test_a_pool_in_host_memory_is_refused_if_no_other_backend_is_named() -> None:
    options: dict[str, Any] = {"incarnation": "a", "secret": SECRET, "host": "127.0.0.1"}
    with pytest.raises(TransportUnavailable, match="host memory"):
        open_transports(make_region(), ("cuda_ipc",), **options)
    opened = open_transports(make_region(), ("cuda_ipc", "tcp"), **options)
    assert [name for name, _ in opened.shard().transports] == ["tcp"]
    asyncio.run(opened.close())


def test_a_process_that_ended_has_no_start_even_before_its_parent_collects_it() -> None:
    child, _ = start_owner("tcp", "owner")
    watch = ProcessWatch(child.pid)
    assert watch.started() == watch.started() != ""
    child.process.kill()
    assert wait([child.process.sentinel], 10)
    assert watch.started() == ""
    child.end()
    assert watch.started() == ""
    watch.close()
    assert ProcessWatch(child.pid).started() == ""


def test_memory_that_cannot_be_shared_is_refused_and_its_driver_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[PagesDriver] = []

    def export(driver: PagesDriver) -> tuple[bytes, int]:
        raise TransportUnavailable("the pool's memory cannot be shared")

    monkeypatch.setattr(PagesDriver, "export", export)
    monkeypatch.setattr(PagesDriver, "close", lambda driver: closed.append(driver))
    with pytest.raises(TransportUnavailable, match="cannot be shared"):
        opened_reader()
    assert len(closed) == 1
