"""A session over connections that are cut at random places: every frame arrives once, in order."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvtransfer.errors import PeerLost
from kvtransfer.rpc.frames import FrameStream, Kind
from kvtransfer.rpc.session import WINDOW, SessionStream

Frame = tuple[int, int, bytes]


class Relay:
    """Copies bytes between two ends; `cut` breaks the connection after some more bytes of the named direction."""

    def __init__(self) -> None:
        self.upstream = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._left: int | None = None
        self._copies: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self, after_bytes: int = 0) -> None:
        self._left = after_bytes
        if not after_bytes:
            self._abort()

    async def close(self) -> None:
        self._server.close()
        self._abort()
        await asyncio.gather(*self._copies, return_exceptions=True)

    def _abort(self) -> None:
        self._left = None
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        self._writers |= {writer, far_writer}
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.ensure_future(self._copy(source, target))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(997):
                if self._left is not None:
                    target.write(data[: self._left])
                    self._left -= len(data)
                    if self._left <= 0:
                        await asyncio.sleep(0)
                        return self._abort()
                else:
                    target.write(data)
            target.close()


class Ends:
    """A caller and a listener of one session, with the frames that each of them got."""

    def __init__(self, relay: Relay, resume_s: float) -> None:
        self.relay = relay
        self.at_caller: list[Frame] = []
        self.at_listener: list[Frame] = []
        self.connections = 0
        self._resume_s = resume_s
        self._arrived = asyncio.Event()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.listening = await loop.create_server(lambda: FrameStream(self._accept), "127.0.0.1", 0)
        self.relay.upstream = self.listening.sockets[0].getsockname()[1]
        self._port = await self.relay.start()
        first, _ = await self._connect(0, 0)
        self.caller = SessionStream(first, self._resume_s, self._connect)
        self.caller.deliver(lambda *frame: self.at_caller.append(frame), 1 << 20)
        await self._arrived.wait()

    def _accept(self, stream: FrameStream) -> None:
        """As a listener's `admit` and `serve`: a new connection takes the session over."""
        self.connections += 1
        if self.connections == 1:
            self.listener = SessionStream(stream, self._resume_s)
            stream.send(Kind.HANDSHAKE, 0, b"")
            self.listener.deliver(lambda *frame: self.at_listener.append(frame), 1 << 20)
            self._arrived.set()
        else:
            self._resuming = asyncio.ensure_future(self._resume(stream))

    async def _resume(self, stream: FrameStream) -> None:
        with contextlib.suppress(OSError, EOFError, PeerLost):
            _, received, number = await stream.receive(16)
            stream.send(Kind.HANDSHAKE, self.listener.detach(int(number)), b"")
            self.listener.attach(stream, received)

    async def _connect(self, number: int, received: int) -> tuple[FrameStream, int]:
        stream = await FrameStream.connect("127.0.0.1", self._port)
        if number:
            stream.send(Kind.HANDSHAKE, received, b"%d" % number)
        _, theirs, _ = await stream.receive(16)
        return stream, theirs

    async def close(self) -> None:
        for end in (self.caller, self.listener):
            await end.close()
        self.listening.close()
        await self.relay.close()


@asynccontextmanager
async def joined(resume_s: float = 5.0) -> AsyncIterator[Ends]:
    ends = Ends(Relay(), resume_s)
    await ends.open()
    try:
        yield ends
    finally:
        await ends.close()


def frames(count: int, seed: int) -> list[Frame]:
    draw = random.Random(seed)
    return [(Kind.MESSAGE, number, draw.randbytes(draw.choice((0, 3, 40, 3000)))) for number in range(count)]


@pytest.mark.parametrize("seed", range(6))
async def test_every_frame_arrives_once_and_in_order_however_often_the_connection_breaks(seed: int) -> None:
    draw = random.Random(seed)
    up, down = frames(600, seed), frames(600, seed + 100)

    async def send(end: SessionStream, sent: list[Frame]) -> None:
        for frame in sent:
            end.send(Kind(frame[0]), *frame[1:])
            await end.drain()
            if frame[1] % 20 == 0:
                await asyncio.sleep(0.001)

    async def cut(relay: Relay) -> None:
        while True:
            await asyncio.sleep(draw.random() * 0.02)
            relay.cut(draw.choice((0, 1, 7, 13, 500, 4000)))

    async with joined() as ends, asyncio.timeout(60):
        cutting = asyncio.ensure_future(cut(ends.relay))
        await asyncio.gather(send(ends.caller, up), send(ends.listener, down))
        cutting.cancel()
        while len(ends.at_listener) < len(up) or len(ends.at_caller) < len(down):
            await asyncio.sleep(0.01)
        assert ends.at_listener == up and ends.at_caller == down
        assert ends.connections > 3, "otherwise this proves nothing"


async def test_a_peer_that_reads_nothing_gets_a_bounded_number_of_frames() -> None:
    async with joined() as ends, asyncio.timeout(20):
        ends.caller.pause()
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while True:
                    ends.listener.send(Kind.MESSAGE, sent, b"x")
                    sent += 1
                    await ends.listener.drain()
        assert sent == WINDOW
        ends.caller.resume()
        await ends.listener.drain()
        assert len(ends.at_caller) == sent


async def test_a_listener_waits_a_bounded_time_for_its_caller() -> None:
    async with joined(resume_s=0.2) as ends, asyncio.timeout(20):
        ends.relay.upstream = 1  # nobody listens there
        ends.relay.cut()
        assert isinstance(await ends.listener.ended, OSError | EOFError)
        assert isinstance(await ends.caller.ended, OSError | EOFError)
        await ends.listener.drain()
        ends.listener.send(Kind.MESSAGE, 0, b"")  # goes nowhere


async def test_a_caller_whose_listener_is_gone_does_not_wait() -> None:
    async with joined(resume_s=60.0) as ends, asyncio.timeout(20):
        await ends.relay.close()
        assert isinstance(await ends.caller.ended, OSError | EOFError)


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_end_that_closes_does_not_let_the_other_one_wait(at_once: bool) -> None:
    for closing, waiting in (("caller", "listener"), ("listener", "caller")):
        async with joined(resume_s=60.0) as ends, asyncio.timeout(20):
            end: SessionStream = getattr(ends, closing)
            if at_once:
                end.abort()
            else:
                await end.close()
            assert "the peer ended the session" in str(await getattr(ends, waiting).ended)


async def test_a_session_that_ends_while_it_connects_again_does_not_let_the_listener_wait() -> None:
    async with joined(resume_s=60.0) as ends, asyncio.timeout(20):
        reopen, opened, go_on = ends.caller._reopen, asyncio.Event(), asyncio.Event()
        assert reopen is not None

        async def slow(*counts: int) -> tuple[FrameStream, int]:
            connection = await reopen(*counts)
            opened.set()
            await go_on.wait()
            return connection

        ends.caller._reopen = slow
        ends.relay.cut()
        await opened.wait()
        ends.caller.abort()
        go_on.set()
        assert "the peer ended the session" in str(await ends.listener.ended)


async def test_a_refused_session_has_ended() -> None:
    async with joined(resume_s=60.0) as ends, asyncio.timeout(20):

        async def refused(*_: int) -> tuple[FrameStream, int]:
            raise PeerLost("the session has ended")

        ends.caller._reopen = refused
        ends.relay.cut()
        await ends.caller.ended


async def test_a_connection_that_was_overtaken_by_a_newer_one_is_refused() -> None:
    async with joined() as ends:
        assert ends.listener.detach(2) == 0
        with pytest.raises(PeerLost, match="connection 1 comes after connection 2"):
            ends.listener.detach(1)


async def test_an_impossible_count_ends_the_session() -> None:
    async with joined() as ends, asyncio.timeout(20):
        assert ends.caller._stream is not None
        ends.caller._stream.send(Kind.ACK, 3, b"")
        assert "it got 3 frames, of 0 that were sent" in str(await ends.listener.ended)
