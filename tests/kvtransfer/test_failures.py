"""What happens when one side dies, hangs, or sends invalid bytes during a read."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from kvtransfer.backends import nixl_agent, tcp_owner
from kvtransfer.errors import PeerLost, TransferTimeout, TransportUnavailable
from kvtransfer.rpc.frames import Kind, pack_header
from kvtransfer.rpc.handshake import HANDSHAKE_BYTES, MAX_UNAUTHENTICATED
from kvtransfer.ticket import PeerAddress, rank_name
from kvtransfer.transport import Read
from tests.kvtransfer.conftest import need
from tests.kvtransfer.peers import (
    LARGE,
    LAYOUT,
    NUM_BLOCKS,
    SECRET,
    Child,
    address_of,
    block_bytes_of,
    block_of,
    callers,
    make_region,
    no_descriptors_left,
    open_set,
    own,
    read_for_ever,
    start,
    start_owner,
    whole_blocks,
)

BLOCKS = 64
SCATTERED = whole_blocks(*((block, BLOCKS + 1 - block) for block in range(2, BLOCKS)), size=LARGE.block_bytes)


def name_of(peer: PeerAddress) -> str:
    return rank_name(peer.incarnation, 0)


processes = pytest.mark.parametrize("backend", ["tcp", "nixl", "cuda_ipc"])


async def start_large_owner(backend: str) -> tuple[Child, PeerAddress]:
    need(backend)
    return await asyncio.to_thread(start_owner, backend, f"large-{backend}", LARGE, BLOCKS)


@pytest.mark.grid
@processes
async def test_a_killed_owner_is_lost_and_the_reader_survives(backend: str) -> None:
    child, peer = await start_large_owner(backend)
    reader = open_set(make_region(LARGE, BLOCKS), (backend,), "reader")
    await reader.connect(peer)
    transport = reader._transports[0]
    asyncio.get_running_loop().call_later(0.05, child.process.kill)
    with pytest.raises(PeerLost):  # not a timeout
        while True:
            read = transport.read(name_of(peer), SCATTERED, deadline_s=60)
            await read.done
    await asyncio.wait_for(read.settled, 30.0)
    child.end()
    other, address = await start_large_owner(backend)  # and the reader goes on with another owner
    await reader.connect(PeerAddress("w", "large-" + backend, "127.0.0.1", 0, address.shards))
    await transport.read(name_of(address), whole_blocks((7, 8), size=LARGE.block_bytes), deadline_s=10).done
    other.end()
    await reader.close()


@pytest.mark.grid
@processes
async def test_a_killed_reader_leaves_the_owner_alive(backend: str) -> None:
    child, peer = await start_large_owner(backend)
    for delay_s in (0.02, 0.1):
        victim = await asyncio.to_thread(start, read_for_ever, backend, peer)
        await asyncio.to_thread(victim.receive)
        await asyncio.sleep(delay_s)
        victim.end()
    assert child.ask("still there?") == "alive"
    reader = open_set(make_region(LARGE, BLOCKS), (backend,), "reader")
    await reader.connect(peer)
    await reader.close()
    assert child.process.is_alive()
    child.end()


async def test_a_stopped_owner_times_out_settles_and_no_late_byte_lands() -> None:
    child, peer = await start_large_owner("tcp")
    region = make_region(LARGE, BLOCKS)
    reader = open_set(region, ("tcp",), "reader")
    await reader.connect(peer)
    transport = reader._transports[0]
    read = transport.read(name_of(peer), SCATTERED, deadline_s=0.3)
    os.kill(child.pid, signal.SIGSTOP)
    behind = transport.read(name_of(peer), SCATTERED, deadline_s=0.3)
    for each in (read, behind):
        with pytest.raises(TransferTimeout):
            await each.done
        await asyncio.wait_for(each.settled, 30.0)
    canary = b"\xa5" * region.num_bytes
    region.bytes()[:] = canary
    os.kill(child.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert bytes(region.bytes()) == canary
    await transport.read(name_of(peer), whole_blocks((7, 8), size=LARGE.block_bytes), deadline_s=10).done
    assert block_of(region, 8) == block_bytes_of(7, LARGE)
    child.end()
    await reader.close()


async def test_a_stopped_owner_is_still_read_over_cma() -> None:
    child, peer = await start_large_owner("nixl")
    region = make_region(LARGE, BLOCKS)
    reader = open_set(region, ("nixl",), "reader")
    await reader.connect(peer)
    os.kill(child.pid, signal.SIGSTOP)
    await reader._transports[0].read(name_of(peer), SCATTERED, deadline_s=5).done
    assert block_of(region, 8) == block_bytes_of(BLOCKS + 1 - 8, LARGE)
    child.end()
    await reader.close()


async def test_forgetting_an_owner_ends_its_reads_at_once() -> None:
    child, peer = await start_large_owner("tcp")
    reader = open_set(make_region(LARGE, BLOCKS), ("tcp",), "reader")
    await reader.connect(peer)
    os.kill(child.pid, signal.SIGSTOP)
    read = reader._transports[0].read(name_of(peer), SCATTERED, deadline_s=60)
    await asyncio.wait_for(reader.forget(peer.incarnation), 30.0)
    with pytest.raises(PeerLost):
        await read.done
    assert read.settled.done()
    child.end()
    await reader.close()


def test_garbage_does_not_hurt_a_tcp_owner(tcp_owner: tuple[Child, PeerAddress]) -> None:
    child, peer = tcp_owner
    _, port = msgspec.msgpack.decode(dict(peer.shards[0].transports)["tcp"]).values()
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(200),
        pack_header(Kind.HANDSHAKE, 0, 1 << 50),
        pack_header(Kind.HANDSHAKE, 0, HANDSHAKE_BYTES) + os.urandom(HANDSHAKE_BYTES),
        pack_header(Kind.CALL, 1, 16) + bytes(16),
        bytes(5000),
    ):
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.settimeout(30)
            with contextlib.suppress(OSError):  # the owner hangs up, as it should
                link.sendall(garbage)
                link.shutdown(socket.SHUT_WR)
                while link.recv(4096):
                    pass
    assert child.ask("still there?") == "alive"


def silent_connections(port: int, count: int) -> list[socket.socket]:
    """Connections of silent peers."""
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for link in links:
        link.settimeout(30)
    return links


async def test_unauthenticated_connections_take_no_readers_place() -> None:
    owner = open_set(make_region(filled=True), ("tcp",), "owner", max_readers=3)
    tcp = owner._transports[0]._owner  # type: ignore[attr-defined]
    crowd = await asyncio.to_thread(silent_connections, tcp.port, 3 * MAX_UNAUTHENTICATED)
    readers = [open_set(make_region(), ("tcp",), f"reader-{number}") for number in range(4)]
    for reader in readers[:3]:
        await reader.connect(address_of(owner, "owner"))
    assert tcp.num_connections <= MAX_UNAUTHENTICATED + 3
    with pytest.raises(TransportUnavailable, match=r"serves 3 readers already.*raise that.*ulimit -n"):
        await readers[3].connect(address_of(owner, "owner"))
    await readers[0].close()
    async with asyncio.timeout(30.0):
        while len(tcp._readers) == 3:
            await asyncio.sleep(0.01)
    await readers[3].connect(address_of(owner, "owner"))
    for link in crowd:
        link.close()
    await asyncio.gather(*(reader.close() for reader in readers[1:]), owner.close())
    assert tcp.num_connections == 0


def test_a_slow_handshake_is_cut_off_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "HANDSHAKE_S", 0.5)
    owner = tcp_owner.TcpOwner(make_region(), "127.0.0.1", SECRET, "owner", 3)
    [link] = silent_connections(owner.port, 1)
    cut_off = False
    for _ in range(50):  # a byte each 0.1 s: within any timeout of one call
        try:
            link.sendall(b"\0")
        except OSError:
            cut_off = True
            break
        time.sleep(0.1)
    assert cut_off
    owner.close(30.0)


async def test_a_tcp_owner_accepts_again_once_there_are_descriptors() -> None:
    owner = open_set(make_region(filled=True), ("tcp",), "owner")
    tcp = owner._transports[0]._owner  # type: ignore[attr-defined]
    calling = callers()
    with no_descriptors_left():
        for caller in calling:
            await asyncio.to_thread(caller.connect, ("127.0.0.1", tcp.port))
        async with asyncio.timeout(30.0):
            while tcp.num_accept_failures < 2:
                await asyncio.sleep(0.01)
    reader = open_set(make_region(), ("tcp",), "reader")
    await reader.connect(address_of(owner, "owner"))
    for caller in calling:
        caller.close()
    await asyncio.gather(reader.close(), owner.close())


class StuckAgent:
    """A fake NIXL agent whose reads never end."""

    lost = ConnectionError
    progress_s = None
    made = 0
    destroyed = 0

    def __init__(self) -> None:
        StuckAgent.made += 1

    def address(self) -> bytes:
        return b"agent %d" % StuckAgent.made

    def destroy(self, peers: object, *, idle: bool) -> None:
        assert not idle
        StuckAgent.destroyed += 1

    def prepare(self, nixl_peer: object, copies: object) -> "StuckAgent":
        return self

    def post(self, handle: object) -> bool:
        return False

    poll = post

    def release(self) -> None:
        pass


async def test_a_read_that_never_ends_is_fenced_by_a_new_agent() -> None:
    from types import SimpleNamespace

    from kvtransfer.backends.nixl_pump import NixlPump
    from kvtransfer.backends.pending_read import PendingRead

    pump = NixlPump(StuckAgent, 100, quarantine_s=0.3)  # type: ignore[arg-type]
    pump.submit(pump.start).result()
    pump._peers["owner"] = SimpleNamespace(address=SimpleNamespace(num_bytes=100))  # type: ignore[assignment]
    pending = PendingRead("owner", whole_blocks((0, 0), size=10), 0.5)
    read: Read = pending.read
    order: list[str] = []
    read.done.add_done_callback(lambda _: order.append("done"))
    read.settled.add_done_callback(lambda _: order.append("settled"))
    await asyncio.wrap_future(pump.submit(lambda: pump.read(pending)))
    with pytest.raises(TransferTimeout):
        await read.done
    await asyncio.wait_for(read.settled, 10)
    assert order == ["done", "settled"], "bytes may still land after the deadline"
    await asyncio.wait_for(asyncio.wrap_future(pump.submit(lambda: None)), 1)  # the thread goes on
    assert (StuckAgent.made, StuckAgent.destroyed, pump._peers) == (2, 1, {})
    assert pump.address == b"agent 2"
    pump._agent = None
    pump.submit(pump.stop)
    pump.thread.join(2)


async def test_a_rebuilt_agent_connects_to_its_peers_again_under_another_address(
    nixl_owner: tuple[Child, PeerAddress],
) -> None:
    peer = nixl_owner[1]
    region = make_region()
    reader = open_set(region, ("nixl",), "reader")
    await reader.connect(peer)
    pump = reader._transports[0]._pump  # type: ignore[attr-defined]
    before = reader.shard()
    await asyncio.wrap_future(pump.submit(pump._fence))
    assert reader.shard() != before
    with pytest.raises(PeerLost, match="connect"):
        await reader._transports[0].read(name_of(peer), whole_blocks((2, 2)), deadline_s=5).done
    await reader.connect(peer)
    await reader._transports[0].read(name_of(peer), whole_blocks((2, 9)), deadline_s=5).done
    assert block_of(region, 9) == block_bytes_of(2)
    await reader.close()


async def test_a_fence_leaves_no_reference_that_could_keep_the_agent_alive(
    nixl_owner: tuple[Child, PeerAddress],
) -> None:
    reader = open_set(make_region(), ("nixl",), "reader")
    await reader.connect(nixl_owner[1])
    await reader._transports[0].read("owner-nixl/0", whole_blocks((2, 2)), deadline_s=5).done
    pump = reader._transports[0]._pump  # type: ignore[attr-defined]
    native = pump._agent._agent.agent
    await asyncio.wrap_future(pump.submit(lambda: pump._destroy(PeerLost("fenced"))))
    assert sys.getrefcount(native) == 2, "ours and the call's"
    await reader.close()


@processes
async def test_nothing_lands_after_settled_however_short_the_deadline(backend: str) -> None:
    child, peer = await start_large_owner(backend)
    region = make_region(LARGE, BLOCKS)
    reader = open_set(region, (backend,), "reader")
    await reader.connect(peer)
    size = LARGE.block_bytes
    halves = [range(2, BLOCKS // 2), range(BLOCKS // 2, BLOCKS)]
    late = 0
    for turn in range(12):
        blocks, others = halves[turn % 2], halves[1 - turn % 2]
        copies = whole_blocks(*((block, block) for block in blocks), size=size)
        read = reader._transports[0].read(name_of(peer), copies, deadline_s=0.001 + 0.002 * turn)
        await asyncio.wait([read.done])
        late += isinstance(read.done.exception(), TransferTimeout)
        await asyncio.wait_for(read.settled, 30.0)
        canary = region.bytes(blocks[0] * size, len(blocks) * size)
        canary[:] = b"\xa5" * len(canary)
        idle = region.bytes(others[0] * size, len(others) * size)
        assert turn == 0 or set(bytes(idle[::4096])) == {0xA5}
    assert late > 0, "no deadline passed: the test proves nothing"
    child.end()
    await reader.close()


def own_without_thread(pipe: Connection, *arguments: Any) -> None:
    with mock.patch.object(nixl_agent, "has_progress_thread", lambda device: False):
        own(pipe, *arguments)


async def test_agents_without_nixls_thread_as_on_a_gpu_answer_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    need("nixl")
    monkeypatch.setattr(nixl_agent, "has_progress_thread", lambda device: False)
    child = await asyncio.to_thread(start, own_without_thread, "nixl", "owner", LAYOUT, NUM_BLOCKS)
    peer = await asyncio.to_thread(child.receive)
    region = make_region()
    reader = open_set(region, ("nixl",), "reader")
    await reader.connect(peer)
    await reader._transports[0].read(name_of(peer), whole_blocks((2, 9)), deadline_s=5).done
    assert block_of(region, 9) == block_bytes_of(2)
    await reader.close()
    child.end()


QUIET_STORY = """
import asyncio
from tests.kvtransfer.peers import *

async def story():
    child, peer = start_owner("nixl", "owner")
    reader = open_set(make_region(), ("nixl",), "reader")
    print((await reader.connect(peer)).path)
    child.end()
    try:
        await reader._transports[0].read("owner/0", whole_blocks((2, 2)), deadline_s=5).done
    except Exception as error:
        print(type(error).__name__)
    await reader.close()

if __name__ == "__main__":
    asyncio.run(story())
"""


def test_nixl_prints_nothing_and_exits_cleanly_when_its_owner_dies(tmp_path: Path) -> None:
    need("nixl")
    script = tmp_path / "story.py"
    script.write_text(QUIET_STORY)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=60, cwd=Path.cwd()
    )
    assert (done.returncode, done.stderr) == (0, "")
    path, error = done.stdout.splitlines()
    assert path == "UCX cma/memory (same host)"
    assert error == "PeerLost"
