"""The framed RPC under leases, gangs and TCP transfer: authentication, how calls end, effects of a broken peer."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import kvtransfer.errors
from kvtransfer.errors import LeaseLost, PeerLost, PeerRefused, TransferError, TransportUnavailable
from kvtransfer.rpc import handshake as handshakes
from kvtransfer.rpc.connection import RpcConnection, RpcProtocol, _Call
from kvtransfer.rpc.frames import FrameStream, Kind, greet, pack_header
from kvtransfer.rpc.handshake import HANDSHAKE_BYTES, CallerHandshake, ListenerHandshake
from kvtransfer.rpc.listener import RpcListener

SECRET = b"of the test"


class Ask(msgspec.Struct, frozen=True, tag=True):
    what: str


class News(msgspec.Struct, frozen=True, tag=True):
    number: int


PROTOCOL = RpcProtocol(
    name="test",
    calls={Ask: str},
    messages=(News,),
    errors=(kvtransfer.errors,),
    other_error=TransferError,
    lost_error=PeerLost,
    max_frame_bytes=1 << 10,
    max_calls=3,
)


# ---- the handshake ---------------------------------------------------------------------------------------------------


def greeted(listener: ListenerHandshake, caller: CallerHandshake) -> tuple[str, bytes]:
    target = listener.verify(caller.claim(listener.hello))
    return target, caller.accept(listener.welcome(b"body"))


def test_both_ends_learn_what_the_other_sent() -> None:
    assert greeted(ListenerHandshake("a", SECRET), CallerHandshake("a", SECRET, "life-1", "it")) == ("life-1", b"body")


def test_a_claim_is_invalid_on_another_connection() -> None:
    first, second = ListenerHandshake("a", SECRET), ListenerHandshake("a", SECRET)
    claim = CallerHandshake("a", SECRET, "life-1", "it").claim(first.hello)
    assert first.verify(claim) == "life-1"
    with pytest.raises(PeerRefused, match="secret"):
        second.verify(claim)


def test_a_reflected_proof_is_refused() -> None:
    listener, caller = ListenerHandshake("a", SECRET), CallerHandshake("a", SECRET, "", "it")
    claim = msgspec.msgpack.decode(caller.claim(listener.hello), type=handshakes.Claim)
    with pytest.raises(PeerRefused, match="it and this process don't share one secret"):
        caller.accept(msgspec.msgpack.encode(handshakes.Verdict(claim.proof, "", b"")))


@pytest.mark.parametrize("changed", ["target", "body", "error"])
def test_content_sent_with_a_proof_cannot_be_changed(changed: str) -> None:
    listener, caller = ListenerHandshake("a", SECRET), CallerHandshake("a", SECRET, "life-1", "it")
    claim = msgspec.msgpack.decode(caller.claim(listener.hello), type=handshakes.Claim)
    if changed == "target":
        with pytest.raises(PeerRefused):
            listener.verify(msgspec.msgpack.encode(msgspec.structs.replace(claim, target="life-2")))
        return
    listener.verify(msgspec.msgpack.encode(claim))
    verdict = msgspec.msgpack.decode(listener.welcome(b"body"), type=handshakes.Verdict)
    other = {"body": b"other"} if changed == "body" else {"error": "PeerLost"}
    with pytest.raises(PeerRefused, match="secret"):
        caller.accept(msgspec.msgpack.encode(msgspec.structs.replace(verdict, **other)))


def test_another_protocol_or_release_is_named() -> None:
    with pytest.raises(PeerRefused, match=r"it doesn't speak our a protocol \(it speaks b\).*one release"):
        greeted(ListenerHandshake("b", SECRET), CallerHandshake("a", SECRET, "", "it"))
    newest = handshakes.VERSION
    for version, oldest in ((newest - 1, 0), (newest + 2, newest + 1)):
        hello = msgspec.msgpack.encode(handshakes.Hello("a", version, bytes(32), oldest))
        with pytest.raises(PeerRefused, match=f"it speaks versions {oldest or version} to {version}"):
            CallerHandshake("a", SECRET, "", "it").claim(hello)
    listener = ListenerHandshake("a", SECRET)
    claim = msgspec.msgpack.decode(CallerHandshake("a", SECRET, "", "it").claim(listener.hello), type=handshakes.Claim)
    for version in (newest - 1, newest + 1):
        with pytest.raises(PeerRefused, match=f"the caller speaks version {version}"):
            listener.verify(msgspec.msgpack.encode(msgspec.structs.replace(claim, version=version)))


@pytest.mark.parametrize("newer_listens", [True, False])
def test_consecutive_releases_agree_on_the_newest_version_that_both_know(
    newer_listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = handshakes.VERSION

    def become(version: int) -> None:
        monkeypatch.setattr(handshakes, "VERSION", version)
        monkeypatch.setattr(handshakes, "OLDEST_VERSION", newest)

    listens, calls = (newest + 1, newest) if newer_listens else (newest, newest + 1)
    become(listens)
    listener = ListenerHandshake("a", SECRET)
    become(calls)
    caller = CallerHandshake("a", SECRET, "life-1", "it")
    claim = caller.claim(listener.hello)
    assert msgspec.msgpack.decode(claim, type=handshakes.Claim).version == newest
    become(listens)
    assert listener.verify(claim) == "life-1"
    welcome = listener.welcome(b"body")
    become(calls)
    assert caller.accept(welcome) == b"body"


async def test_a_call_with_an_unknown_field_is_served_and_an_unknown_call_gets_an_error() -> None:
    async with connected(echo) as (caller, _):

        def sent(number: int, call: dict[str, object]) -> "asyncio.Future[str]":
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            caller._calls[number] = _Call(str, 0, answer)
            caller._stream.send(Kind.CALL, number, msgspec.msgpack.encode(call))
            return answer

        assert await sent(101, {"type": "Ask", "what": "a", "since": 9}) == "a"
        with pytest.raises(TransferError, match="ValidationError: Invalid value 'Later'"):
            await sent(102, {"type": "Later", "what": "a"})
        assert await caller.call(Ask("b"), 5) == "b"


# ---- calls -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def connected(
    on_call: Callable[[Ask], Any], admit: Callable[[str], bytes] = lambda _: b""
) -> AsyncIterator[tuple[RpcConnection, RpcConnection]]:
    """A caller's connection and the listener's."""
    served: asyncio.Future[RpcConnection] = asyncio.get_running_loop().create_future()

    async def serve(_: str, stream: FrameStream) -> None:
        connection = RpcConnection(stream, PROTOCOL, "the caller", on_call=on_call)
        if not served.done():
            served.set_result(connection)
        try:
            await connection.run()
        finally:
            await connection.close()

    listener = RpcListener(PROTOCOL.name, SECRET, admit, serve)
    port = await listener.start("127.0.0.1")
    stream = await FrameStream.connect("127.0.0.1", port)
    caller = RpcConnection(stream, PROTOCOL, "the listener")
    try:
        async with asyncio.timeout(20):
            await greet(stream, CallerHandshake(PROTOCOL.name, SECRET, "", "the listener"))
            running = asyncio.ensure_future(caller.run())
            yield caller, await served
            await caller.close()
            await running
    finally:
        await caller.close()
        await listener.close()


async def echo(request: Ask) -> str:
    return request.what


async def test_a_call_that_is_refused_gets_the_listeners_error() -> None:
    def full(_: str) -> bytes:
        raise TransportUnavailable("no room")

    with pytest.raises(TransportUnavailable, match="the listener refused the connection: no room"):
        async with connected(echo, full):
            raise AssertionError("admitted")


async def test_errors_arrive_as_the_class_that_was_raised_and_bugs_as_one_line() -> None:
    async def fail(request: Ask) -> str:
        raise LeaseLost("expired") if request.what == "ours" else RuntimeError("a bug\nwith details")

    async with connected(fail) as (caller, _):
        with pytest.raises(LeaseLost, match=r"^expired$"):
            await caller.call(Ask("ours"), 5)
        with pytest.raises(TransferError, match=r"^the listener: RuntimeError: a bug$"):
            await caller.call(Ask("bug"), 5)


async def test_a_reply_after_the_deadline_is_dropped_and_the_connection_goes_on() -> None:
    go_on = asyncio.Event()

    async def slow(request: Ask) -> str:
        if request.what == "slow":
            await go_on.wait()
        return request.what

    async with connected(slow) as (caller, _):
        with pytest.raises(TimeoutError):
            await caller.call(Ask("slow"), 0.05)
        go_on.set()
        assert [await caller.call(Ask(word), 5) for word in "ab"] == ["a", "b"]


async def test_unanswered_calls_are_bounded_at_both_ends() -> None:
    started: list[str] = []
    go_on = asyncio.Event()

    async def slow(request: Ask) -> str:
        started.append(request.what)
        await go_on.wait()
        return request.what

    async with connected(slow) as (caller, _):
        calls = [caller.begin(Ask(word)) for word in "abc"]
        with pytest.raises(TransferError, match="the listener leaves 3 calls unanswered"):
            await caller.begin(Ask("d"))
        ignoring_the_bound = [asyncio.get_running_loop().create_future() for _ in range(2)]
        for number, future in enumerate(ignoring_the_bound, 4):
            caller._calls[number] = _Call(str, 0, future)
            caller._stream.send(Kind.CALL, number, msgspec.msgpack.encode(Ask(str(number))))
        await asyncio.sleep(0.1)
        assert started == ["a", "b", "c"], "the others are not even read"
        go_on.set()
        assert await asyncio.gather(*calls, *ignoring_the_bound) == ["a", "b", "c", "4", "5"]


async def test_a_broken_connection_fails_every_call_at_once_and_every_later_one() -> None:
    async def never(_: Ask) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async with connected(never) as (caller, served):
        calls = [caller.begin(Ask("x")) for _ in range(2)]
        served.disconnect(PeerLost("cut by the test"))
        for call in (*calls, caller.begin(Ask("y"))):
            with pytest.raises(PeerLost, match=r"^the listener "):
                await call


async def test_invalid_bytes_of_one_peer_do_not_affect_the_others() -> None:
    draw = random.Random(0)
    async with connected(echo) as (caller, served):
        assert isinstance(served._stream, FrameStream)
        port = served._stream._wire.get_extra_info("sockname")[1]
        for number in range(30):
            kind, length = draw.choice([*Kind, 0, 255]), draw.choice([0, 1, 40, HANDSHAKE_BYTES, 1 << 40])
            body = os.urandom(min(length, HANDSHAKE_BYTES))
            stream = await FrameStream.connect("127.0.0.1", port)
            if number % 2:
                await greet(stream, CallerHandshake(PROTOCOL.name, SECRET, "", "the listener"))
            stream._wire.write(pack_header(kind, draw.randrange(4), length) + body)
            stream._wire.write_eof()
            async with asyncio.timeout(30.0):
                with pytest.raises((EOFError, OSError)):
                    while True:
                        await stream.receive(1 << 20)
            await stream.close()
        assert await caller.call(Ask("still there?"), 5) == "still there?"


async def test_a_loop_whose_transports_have_a_fixed_read_size_works() -> None:
    """Ray runs asynchronous actors on uvloop wherever it is installed; its transports take no `max_size`."""

    class FixedTransport(asyncio.Transport):
        __slots__ = ()

    stream = FrameStream()
    stream.connection_made(FixedTransport())
    assert not stream.ended.done()
