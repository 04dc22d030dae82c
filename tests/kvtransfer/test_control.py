"""The lease protocol: authentication, the replies to a watch, and what a release proves."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator

import msgspec
import pytest

from kvtransfer.control import ControlClient, ControlServer
from kvtransfer.errors import (
    LeaseLost,
    PeerLost,
    PeerRefused,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from kvtransfer.rpc.frames import FrameStream, Kind, pack_header
from kvtransfer.rpc.handshake import HANDSHAKE_S, MAX_UNAUTHENTICATED, ListenerHandshake, Unauthenticated
from kvtransfer.ticket import PeerAddress, Progress, ShardAddress
from tests.kvtransfer.frame_server import served
from tests.kvtransfer.leases import MemoryLeases
from tests.kvtransfer.peers import (
    LAYOUT,
    SECRET,
    address_of,
    callers,
    make_region,
    no_descriptors_left,
    open_set,
    whole_piece,
)

SHARD = ShardAddress(0, LAYOUT, 64, (("tcp", b"\x00\xff"),))
PIECES = (whole_piece(),)
PEER = PeerAddress("prefill-0", "life-1", "127.0.0.1", 0, (SHARD,))


def cells(*digests: int) -> tuple[bytes, ...]:
    """Cells of blocks whose digests add up to these numbers."""
    num_cells = whole_piece().num_cells
    return tuple(struct.pack(f"<{num_cells}Q", *[0] * (num_cells - 1), digest) for digest in digests)


class Owner:
    def __init__(self) -> None:
        self.leases = MemoryLeases(LAYOUT)
        self.server = ControlServer(self.leases, lambda: PEER, SECRET)
        self.port = 0
        self.clients: list[ControlClient] = []

    async def meet(self, **options: object) -> ControlClient:
        options = {"secret": SECRET, "expected_incarnation": "life-1", **options}
        client = await ControlClient.connect("127.0.0.1", self.port, **options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    made = Owner()
    made.port = await made.server.start("127.0.0.1")
    made.leases.grant("lease", epoch=3)
    yield made
    for client in made.clients:
        await client.close()
    await made.server.close()


async def test_the_handshake_brings_the_owners_full_address(owner: Owner) -> None:
    assert (await owner.meet()).peer == PEER
    assert (await owner.meet(expected_incarnation=None)).peer == PEER


async def test_a_wrong_secret_is_refused(owner: Owner) -> None:
    with pytest.raises(PeerRefused, match="secret"):
        await owner.meet(secret=b"another")


async def test_an_earlier_incarnation_is_lost(owner: Owner) -> None:
    with pytest.raises(PeerLost, match="life-1 now"):
        await owner.meet(expected_incarnation="life-0")


async def test_an_owner_that_cannot_prove_the_secret_is_refused() -> None:
    async def pretend(stream: FrameStream) -> None:
        handshake = ListenerHandshake("lease", b"guessed")
        stream.send(Kind.HANDSHAKE, 0, handshake.hello)
        await stream.receive_handshake()
        stream.send(Kind.HANDSHAKE, 0, handshake.welcome(msgspec.msgpack.encode(PEER)))

    server = await served(pretend)
    with pytest.raises(PeerRefused, match="secret"):
        await ControlClient.connect("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    server.close()


async def test_a_port_without_a_listener_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost):
        await ControlClient.connect("127.0.0.1", 1, SECRET)


async def test_a_reader_without_descriptors_does_not_blame_the_owner(owner: Owner) -> None:
    reader = open_set(make_region(), ("tcp",), "reader")
    other = open_set(make_region(filled=True), ("tcp",), "other")
    with no_descriptors_left():
        with pytest.raises(TransportUnavailable, match=r"this process cannot connect to .*Too many open files.*ulimit"):
            await owner.meet()
        with pytest.raises(TransportUnavailable, match=r"this process cannot connect to other/0 at .*Too many open"):
            await reader.connect(address_of(other, "other"))
    assert (await owner.meet()).peer == PEER
    await reader.connect(address_of(other, "other"))
    await asyncio.gather(reader.close(), other.close())


async def test_a_silent_owner_times_out() -> None:
    writers = []  # dropped, they would close their connections
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    with pytest.raises(TransferTimeout):
        await ControlClient.connect("127.0.0.1", server.sockets[0].getsockname()[1], SECRET, deadline_s=0.2)
    server.close()


async def test_a_watch_answers_when_the_watermark_moves(owner: Owner) -> None:
    client = await owner.meet()
    watch = asyncio.create_task(client.watch("lease", 3, 0, timeout_s=10, pieces=PIECES))
    await asyncio.sleep(0.05)
    assert not watch.done()
    owner.leases.advance("lease", cells(2**64 - 1, 7))
    assert await watch == Progress(2, 0, ((2**64 - 1, 7),), False, 30.0)


async def test_a_watch_answers_at_once_when_more_is_ready_or_all_is_finished(owner: Owner) -> None:
    client = await owner.meet()
    owner.leases.advance("lease", cells(1, 2, 3))
    assert (await client.watch("lease", 3, 1, timeout_s=10, pieces=PIECES)).digests == ((2, 3),)
    owner.leases.finish("lease")
    assert (await client.watch("lease", 3, 3, timeout_s=10, pieces=PIECES)).finished


async def test_a_watch_without_news_answers_at_its_timeout(owner: Owner) -> None:
    client = await owner.meet()
    assert await client.watch("lease", 3, 0, timeout_s=0.05, pieces=PIECES) == Progress(0, 0, ((),), False, 30.0)


async def test_every_watch_is_a_heartbeat(owner: Owner) -> None:
    client = await owner.meet()
    for _ in range(3):
        await client.watch("lease", 3, 0, timeout_s=0, pieces=PIECES)
    assert owner.leases.heartbeats("lease") == 3


async def test_watches_of_many_leases_share_a_connection(owner: Owner) -> None:
    client = await owner.meet()
    for name in ("a", "b"):
        owner.leases.grant(name)
    watches = [asyncio.create_task(client.watch(name, 1, 0, timeout_s=10, pieces=PIECES)) for name in ("a", "b")]
    await asyncio.sleep(0.05)
    owner.leases.advance("b", cells(5))
    assert (await watches[1]).digests == ((5,),)
    assert not watches[0].done()
    owner.leases.advance("a", cells(6))
    assert (await watches[0]).digests == ((6,),)


async def test_another_epoch_fences_an_older_reader(owner: Owner) -> None:
    client = await owner.meet()
    with pytest.raises(LeaseLost, match="epoch 3"):
        await client.watch("lease", 2, 0, timeout_s=1, pieces=PIECES)
    with pytest.raises(LeaseLost, match="epoch 3"):
        await client.release("lease", 2)


async def test_a_lease_is_released_once(owner: Owner) -> None:
    client = await owner.meet()
    await client.release("lease", 3)
    assert owner.leases.released == ["lease"]
    with pytest.raises(LeaseLost):
        await client.release("lease", 3)


async def test_an_expiring_lease_ends_its_watch(owner: Owner) -> None:
    client = await owner.meet()
    watch = asyncio.create_task(client.watch("lease", 3, 0, timeout_s=10, pieces=PIECES))
    await asyncio.sleep(0.05)
    owner.leases.expire("lease")
    with pytest.raises(LeaseLost, match="expired"):
        await watch


async def test_a_cut_connection_loses_all_waiting_calls_at_once(owner: Owner) -> None:
    lost: list[str] = []
    client = await owner.meet(on_lost=lambda: lost.append("lost"))
    watches = [asyncio.create_task(client.watch("lease", 3, 0, timeout_s=60, pieces=PIECES)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(owner.server.close(), 30.0)
    results = await asyncio.wait_for(asyncio.gather(*watches, return_exceptions=True), 30.0)
    assert [type(result) for result in results] == [PeerLost] * 3
    assert lost == ["lost"]
    with pytest.raises(PeerLost):
        await client.watch("lease", 3, 0, timeout_s=1, pieces=PIECES)


async def test_a_hung_owner_times_out(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtransfer import control

    async def hang(*request: object) -> Progress:
        await asyncio.sleep(30)
        raise AssertionError

    monkeypatch.setattr(control, "GRACE_S", 0.1)
    monkeypatch.setattr(owner.leases, "watch", hang)
    client = await owner.meet()
    with pytest.raises(TransferTimeout):
        await client.watch("lease", 3, 0, timeout_s=0.1, pieces=PIECES)


async def test_a_bug_in_the_owners_leases_is_an_error_not_a_hang(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner.leases, "release", lambda lease, epoch: 1 / 0)
    client = await owner.meet()
    with pytest.raises(TransferError, match="ZeroDivisionError"):
        await client.release("lease", 3)


async def test_closing_a_client_does_not_call_it_lost(owner: Owner) -> None:
    lost: list[str] = []
    client = await owner.meet(on_lost=lambda: lost.append("lost"))
    await client.close()
    assert lost == []


async def test_garbage_does_not_hurt_the_server(owner: Owner) -> None:
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        pack_header(Kind.HANDSHAKE, 0, 5) + b"hello",
        os.urandom(300),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", owner.port)
        writer.write(garbage)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 30.0)
        writer.close()
    client = await owner.meet()
    assert (await client.watch("lease", 3, 0, timeout_s=0, pieces=PIECES)).ready_blocks == 0


async def test_garbage_after_the_handshake_ends_only_that_connection(owner: Owner) -> None:
    bad, good = await owner.meet(), await owner.meet()
    assert isinstance(bad._connection._stream, FrameStream)
    bad._connection._stream._wire.write(pack_header(Kind.CALL, 1, 4) + b"\xde\xad\xbe\xef")
    with pytest.raises(PeerLost):
        await bad.watch("lease", 3, 0, timeout_s=5, pieces=PIECES)
    assert (await good.watch("lease", 3, 0, timeout_s=0, pieces=PIECES)).ready_blocks == 0


async def silent(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Connections of silent peers."""
    return [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(count)]


async def test_unauthenticated_connections_take_no_readers_place() -> None:
    server = ControlServer(MemoryLeases(LAYOUT), lambda: PEER, SECRET, max_readers=2)
    port = await server.start("127.0.0.1")
    crowd = await silent(port, 3 * MAX_UNAUTHENTICATED)
    readers = [await ControlClient.connect("127.0.0.1", port, SECRET) for _ in range(2)]
    async with asyncio.timeout(HANDSHAKE_S / 2):  # by the bound, not by their deadline
        while server._listener.num_connections > MAX_UNAUTHENTICATED + 2:
            await asyncio.sleep(0.01)
    with pytest.raises(TransportUnavailable, match=r"prefill-0 serves 2 readers already.*transfer.max_readers.*raise"):
        await ControlClient.connect("127.0.0.1", port, SECRET)
    await readers.pop().close()
    async with asyncio.timeout(30.0):
        while server._listener.num_callers == 2:
            await asyncio.sleep(0.01)
    readers.append(await ControlClient.connect("127.0.0.1", port, SECRET))
    for each in crowd:
        each.close()
    for reader in readers:
        await reader.close()
    await server.close()


async def test_without_descriptors_the_control_port_says_so_once_a_second_and_then_accepts_again(owner: Owner) -> None:
    calling = callers()
    loop, errors = asyncio.get_running_loop(), asyncio.Queue[str]()
    loop.set_exception_handler(lambda _, context: errors.put_nowait(str(context)))
    with no_descriptors_left():
        for caller in calling:
            caller.setblocking(False)
            await loop.sock_connect(caller, ("127.0.0.1", owner.port))
        assert "out of system resource" in await asyncio.wait_for(errors.get(), 30.0)
        await asyncio.sleep(0.2)
        assert errors.empty()
    for caller in calling:
        caller.close()
    assert (await owner.meet()).peer == PEER


def test_a_flood_displaces_its_own_connections() -> None:
    crowd: Unauthenticated[int] = Unauthenticated(4)
    assert [crowd.add(number, "here") for number in range(2)] == [None, None]
    assert [crowd.add(number, "flood") for number in range(10, 20)] == [None, None, *range(10, 18)]
    crowd.discard(18)
    assert crowd.add(2, "here") is None
    assert [crowd.add(number, f"address {number}") for number in range(30, 32)] == [0, 1], "the oldest of the most"
    assert len(crowd) == 4
