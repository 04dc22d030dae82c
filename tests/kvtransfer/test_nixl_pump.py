"""The pump's loop over a stub agent: what it asks, and that it goes on asking. Needs no NIXL."""

import asyncio
import hashlib
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvtransfer.backends import nixl, nixl_pump
from kvtransfer.backends.nixl_agent import NixlAddress, NixlPeer
from kvtransfer.backends.nixl_pump import NixlPump
from kvtransfer.backends.pending_read import NO_COPIES, PendingRead
from kvtransfer.errors import TransferTimeout, TransportUnavailable
from kvtransfer.host import host_identity

ADDRESS = NixlAddress(1, b"", hashlib.sha256(b"").digest(), 0, 1 << 20, 1 << 10, "cpu", (), host_identity())
ROUNDS = 1000


class StubAgent:
    """Its reads are over when they are asked about for the second time: once after the post, once after a pause."""

    progress_s = None
    lost = ConnectionError

    def address(self) -> bytes:
        return b""

    def add_peer(self, peer: str, address: NixlAddress) -> NixlPeer:
        return NixlPeer(peer, address, "", None)

    def trial_read(self, nixl_peer: NixlPeer) -> Any:
        return SimpleNamespace(release=lambda: None, answers=iter((False, True)))

    def trial_path(self, nixl_peer: NixlPeer, log_position: int) -> str:
        return "stub"

    def post(self, handle: Any) -> bool:
        return False

    def poll(self, handle: Any) -> bool:
        return next(handle.answers)

    def remove_peer(self, nixl_peer: NixlPeer) -> None: ...

    def destroy(self, nixl_peer: list[NixlPeer], *, idle: bool) -> None: ...


def opened(monkeypatch: pytest.MonkeyPatch) -> nixl.NixlTransport:
    monkeypatch.setattr(nixl, "load_nixl", lambda: None)
    monkeypatch.setattr(nixl, "NixlAgent", lambda *_: StubAgent())
    region = cast(Any, SimpleNamespace(num_bytes=1 << 20))
    return nixl.NixlTransport(region, identity=host_identity(), quarantine_s=60)


async def test_a_read_in_flight_is_polled_even_with_a_very_short_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So short a pause is what a busy machine makes of a longer one. The last job was queued while the thread was busy,
    and no other comes that could wake it.
    """
    monkeypatch.setattr(nixl_pump, "POLL_MIN_S", 1e-9)
    pump = NixlPump(lambda: cast(Any, StubAgent()), 1 << 20, quarantine_s=60)
    try:
        await asyncio.wrap_future(pump.submit(pump.start))
        for _ in range(ROUNDS):
            queued = threading.Event()
            pump.submit(queued.wait)
            pending = PendingRead("owner", NO_COPIES, 10)
            pump.submit(lambda: pump.forget("owner"))
            pump.submit(partial(pump.connect, pending, ADDRESS))
            queued.set()
            await pending.read.done
    finally:
        pump.submit(pump.stop)
        await asyncio.to_thread(pump.thread.join)


def test_an_agent_that_does_not_start_makes_the_backend_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = threading.Event()

    def hang(*args: object) -> Any:
        starts.wait()
        return StubAgent()

    monkeypatch.setattr(nixl, "OPEN_S", 0.1)
    monkeypatch.setattr(nixl, "load_nixl", lambda: None)
    monkeypatch.setattr(nixl, "NixlAgent", hang)
    region = cast(Any, SimpleNamespace(num_bytes=1 << 20))
    with pytest.raises(TransportUnavailable, match="has not started within"):
        nixl.NixlTransport(region, identity=host_identity(), quarantine_s=60)
    (thread,) = [each for each in threading.enumerate() if each.name == "kv-nixl"]
    starts.set()
    thread.join(10.0)
    assert not thread.is_alive(), "the late agent is stopped"


async def test_closing_an_agent_that_does_not_end_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(StubAgent, "destroy", lambda *_, idle: ends.wait())
    monkeypatch.setattr(nixl, "CLOSE_S", 0.1)
    transport = opened(monkeypatch)
    with pytest.raises(TransferTimeout, match="has not stopped within"):
        await transport.close()
    ends.set()
    monkeypatch.setattr(nixl, "CLOSE_S", 10.0)
    await transport.close()


async def test_an_owner_is_forgotten_in_time_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL copies within a call, so the thread may be busy. A caller that leaves meanwhile does not end it."""
    transport, busy = opened(monkeypatch), threading.Event()
    shard = cast(Any, SimpleNamespace(transports=((nixl.NixlTransport.name, msgspec.msgpack.encode(ADDRESS)),)))
    await transport.connect("owner", shard, deadline_s=10)
    transport._pump.submit(busy.wait)
    monkeypatch.setattr(nixl, "CLOSE_S", 0.1)
    with pytest.raises(TransferTimeout, match="has not ended within"):
        await transport.forget("owner")
    monkeypatch.setattr(nixl, "CLOSE_S", 10.0)
    leaving = asyncio.ensure_future(transport.forget("another"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    busy.set()
    await transport.forget("a third")  # in the thread's order
    assert not transport._pump._peers
    await transport.close()


async def test_connecting_ends_at_its_deadline_although_the_thread_is_busy_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, busy = opened(monkeypatch), threading.Event()
    shard = cast(Any, SimpleNamespace(transports=((nixl.NixlTransport.name, msgspec.msgpack.encode(ADDRESS)),)))
    complete = PendingRead.complete

    def then_busy(pending: PendingRead, seconds: float) -> None:
        transport._pump.submit(busy.wait)
        complete(pending, seconds)

    monkeypatch.setattr(PendingRead, "complete", then_busy)
    with pytest.raises(TransferTimeout):
        await transport.connect("owner", shard, deadline_s=0.2)
    busy.set()
    await transport.close()
