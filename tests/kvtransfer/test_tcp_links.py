"""Many TCP links of one process share one thread on each side, and do not delay each other."""

import asyncio
import os
import signal
import socket
import threading
from functools import partial
from multiprocessing.connection import Connection

import pytest

from kvtransfer.backends import tcp, tcp_owner
from kvtransfer.backends.tcp import TcpTransport
from kvtransfer.errors import PeerLost, TransferTimeout
from kvtransfer.rpc.frames import HEADER_BYTES, Kind, pack_header, parse_header
from kvtransfer.rpc.handshake import HANDSHAKE_BYTES, CallerHandshake
from kvtransfer.ticket import PeerAddress, rank_name
from tests.kvtransfer.peers import (
    LARGE,
    SECRET,
    Child,
    address_of,
    block_bytes_of,
    block_of,
    make_region,
    open_set,
    read_for_ever,
    start,
    start_owner,
    whole_blocks,
)

LINKS = 200
BLOCKS = 64
EVERY_BLOCK = whole_blocks(*((block, block) for block in range(2, BLOCKS)), size=LARGE.block_bytes)


def own_many(pipe: Connection) -> None:
    """A process with as many owners as there are links."""
    opened = [open_set(make_region(num_blocks=4, filled=True), ("tcp",), f"owner-{each}") for each in range(LINKS)]
    pipe.send([address_of(owner, f"owner-{each}") for each, owner in enumerate(opened)])
    pipe.poll(None)


def read_many(pipe: Connection, peer: PeerAddress) -> None:
    """A process with as many readers as there are links, all connected to one owner."""
    asyncio.run(_read_many(pipe, peer))


async def _read_many(pipe: Connection, peer: PeerAddress) -> None:
    readers = [open_set(make_region(num_blocks=4), ("tcp",), f"reader-{each}") for each in range(LINKS)]
    for reader in readers:
        await reader.connect(peer)
    pipe.send("connected")
    pipe.poll(None)


def since(before: set[threading.Thread]) -> list[str]:
    """The names of threads that began since, but for those of event loops."""
    new = {each.name for each in set(threading.enumerate()) - before}
    return [name for name in new if not name.startswith("asyncio")]


async def test_a_reader_of_two_hundred_owners_has_as_many_threads_as_a_reader_of_one() -> None:
    child = start(own_many)
    owners = await asyncio.to_thread(child.receive)
    region = make_region(num_blocks=LINKS + 2)
    reader = open_set(region, ("tcp",), "reader")
    await reader.connect(owners[0])
    before = set(threading.enumerate())
    for owner in owners[1:]:
        await reader.connect(owner)
    tcp = reader._transports[0]
    reads = [
        tcp.read(rank_name(owner.incarnation, 0), whole_blocks((2, 2 + place)), deadline_s=10)
        for place, owner in enumerate(owners)
    ]
    await asyncio.gather(*(read.done for read in reads))
    assert not since(before)
    assert all(block_of(region, 2 + place) == block_bytes_of(2) for place in range(LINKS))
    child.end()
    await reader.close()


async def test_an_owner_of_two_hundred_readers_has_as_many_threads_as_an_owner_of_none() -> None:
    owner = open_set(make_region(num_blocks=4, filled=True), ("tcp",), "owner")
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, int)  # the event loop's own thread
    before = set(threading.enumerate())
    child = start(read_many, address_of(owner, "owner"))
    assert await asyncio.to_thread(child.receive) == "connected"
    tcp = owner._transports[0]._owner  # type: ignore[attr-defined]
    assert tcp.num_connections == LINKS
    assert not since(before)
    child.end()
    async with asyncio.timeout(30.0):
        while tcp.num_connections:
            await asyncio.sleep(0.01)
    await owner.close()


async def test_a_closed_end_connects_nowhere() -> None:
    owner, reader = (open_set(make_region(num_blocks=4), ("tcp",), name) for name in ("owner", "reader"))
    await reader.close()
    with pytest.raises(PeerLost, match="this end is closing"):
        await reader.connect(address_of(owner, "owner"))
    await owner.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


async def test_closing_while_a_thread_is_busy_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, reader = (open_set(make_region(num_blocks=4), ("tcp",), name) for name in ("owner", "reader"))
    await reader.connect(address_of(owner, "owner"))
    transport, busy = reader._transports[0], threading.Event()
    assert isinstance(transport, TcpTransport)
    for poller in (transport._poller, transport._owner._poller):
        poller.call(partial(_wait, busy))
    monkeypatch.setattr(tcp, "CLOSE_S", 0.1)
    with pytest.raises(TransferTimeout, match="has not closed within"):
        await transport.forget(rank_name("owner", 0))
    with pytest.raises(TransferTimeout, match="has not ended within"):
        await transport.close()
    busy.set()
    monkeypatch.setattr(tcp, "CLOSE_S", 30.0)
    await reader.close()
    await owner.close()


async def large_owner(incarnation: str) -> tuple[Child, PeerAddress]:
    return await asyncio.to_thread(start_owner, "tcp", incarnation, LARGE, BLOCKS)


async def test_a_stopped_owner_does_not_delay_reads_from_another_one() -> None:
    (stopped, lost), (child, peer) = await asyncio.gather(large_owner("stopped"), large_owner("owner"))
    reader = open_set(make_region(LARGE, BLOCKS), ("tcp",), "reader")
    for each in (lost, peer):
        await reader.connect(each)
    tcp = reader._transports[0]
    os.kill(stopped.pid, signal.SIGSTOP)
    stuck = tcp.read(rank_name("stopped", 0), EVERY_BLOCK, deadline_s=60)
    for _ in range(3):
        await tcp.read(rank_name("owner", 0), EVERY_BLOCK, deadline_s=30).done
    assert not stuck.done.done()
    await reader.close()
    assert isinstance(stuck.done.exception(), PeerLost) and stuck.settled.done()
    for owner in (stopped, child):
        owner.end()


async def test_a_stopped_reader_does_not_delay_another_one() -> None:
    child, peer = await large_owner("owner")
    stopped = await asyncio.to_thread(start, read_for_ever, "tcp", peer)
    await asyncio.to_thread(stopped.receive)
    os.kill(stopped.pid, signal.SIGSTOP)
    reader = open_set(make_region(LARGE, BLOCKS), ("tcp",), "reader")
    await reader.connect(peer)
    for _ in range(3):
        await reader._transports[0].read(rank_name("owner", 0), EVERY_BLOCK, deadline_s=30).done
    await reader.close()
    for each in (stopped, child):
        each.end()


def receive(link: socket.socket, num_bytes: int) -> bytes:
    return link.recv(num_bytes, socket.MSG_WAITALL)


def receive_handshake(link: socket.socket) -> bytes:
    _, _, length = parse_header(receive(link, HEADER_BYTES), HANDSHAKE_BYTES)
    return receive(link, length)


def admitted(port: int) -> socket.socket:
    """A connection that has proven the secret."""
    link = socket.create_connection(("127.0.0.1", port), timeout=5)
    handshake = CallerHandshake(tcp_owner.PROTOCOL, SECRET, "owner", "owner")
    claim = handshake.claim(receive_handshake(link))
    link.sendall(pack_header(Kind.HANDSHAKE, 0, len(claim)) + claim)
    handshake.accept(receive_handshake(link))
    return link


@pytest.mark.parametrize("stall", ["takes nothing", "sends half a call"])
def test_a_stalled_reader_is_disconnected_and_an_idle_one_is_not(stall: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "STALL_S", 0.3)
    owner = tcp_owner.TcpOwner(make_region(LARGE, BLOCKS, filled=True), "127.0.0.1", SECRET, "owner", 3)
    idle, stalled = admitted(owner.port), admitted(owner.port)
    whole = tcp_owner.RANGE.pack(0, BLOCKS * LARGE.block_bytes)
    call = pack_header(Kind.CALL, 7, len(whole)) + whole
    stalled.sendall(call if stall == "takes nothing" else call[:20])
    for _ in range(500):
        if owner.num_connections == 1:
            break
        threading.Event().wait(0.01)
    assert owner.num_connections == 1
    one = tcp_owner.RANGE.pack(LARGE.block_bytes, 16)
    idle.sendall(pack_header(Kind.CALL, 8, len(one)) + one)
    assert parse_header(receive(idle, HEADER_BYTES), 16) == (Kind.REPLY, 8, 16)
    assert receive(idle, 16) == block_bytes_of(1, LARGE)[:16]
    owner.close(30.0)
    assert owner.num_connections == 0
    for link in (idle, stalled):
        link.close()
