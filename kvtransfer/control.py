"""The lease protocol between a reader and an owner: one authenticated connection, many requests on it.

A watch is a long poll and a heartbeat: the owner extends the lease with each. A release that succeeds proves that the
lease was valid to its end, and so were all the reads before it. Knows leases and peers; knows no KV byte. The frames
are in `kvtransfer.control_wire`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

import msgspec

from diptych.watchdog import patient_timeout
from kvtransfer.challenge import nonce, proof, proves, require_secret
from kvtransfer.control_wire import (
    BROKEN,
    FRAME_BYTES,
    STRANGER_BYTES,
    VERSION,
    Answer,
    Channel,
    Failed,
    Hello,
    Prove,
    Refused,
    Release,
    Released,
    Reply,
    Request,
    Watch,
    Welcome,
)
from kvtransfer.errors import (
    LeaseLost,
    PeerLost,
    PeerRefused,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
    unreachable,
)
from kvtransfer.ticket import PeerAddress, Piece, Progress
from kvtransfer.unauthenticated import Unauthenticated, too_many_readers

logger = logging.getLogger(__name__)

MAX_REQUESTS = 1024  # of one connection, at once
MAX_WATCH_S = 60.0
HANDSHAKE_S = 5.0
GRACE_S = 2.0  # for an answer, beyond the time the owner was told to take


class LeaseSource(Protocol):
    """The owner's leases, as the control server needs them. Both raise `LeaseLost`."""

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress:
        """Extend the lease; answer when more than `have_blocks` are ready or no more will come, else at the timeout.

        The answer has digests for `pieces`. Raises `PeerRefused` when no rank holds one of them.
        """
        ...

    def release(self, lease: str, epoch: int) -> None:
        """End a lease that is valid at this moment."""
        ...


class ControlServer:
    """The owner's end. `address` is asked for every handshake, because a rebuilt transport changes it.

    `max_readers` bounds the readers that are connected; those that have not proven the secret yet have a bound of
    their own. When an accept fails (no file descriptors), asyncio logs it and tries again every second.
    """

    def __init__(
        self, source: LeaseSource, address: Callable[[], PeerAddress], secret: bytes, *, max_readers: int = 256
    ) -> None:
        self._source = source
        self._address = address
        self._secret = require_secret(secret)
        self._server: asyncio.Server | None = None
        self._max_readers = max_readers
        self._connections: set[asyncio.Task[None]] = set()
        self._unauthenticated: Unauthenticated[Channel] = Unauthenticated()
        self._readers: set[Channel] = set()
        self._closing = False

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; answers the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Hang up on all readers; their calls end with `PeerLost`. Leases are not touched."""
        self._closing = True
        if self._server:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server:
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        channel = Channel(reader, writer)
        self._connections.add(task)
        displaced = self._unauthenticated.add(channel, channel.peer_host)
        if displaced is not None:
            displaced.abort()
        try:
            if await self._greet(channel):
                await self._serve(channel)
        except (*BROKEN, TimeoutError) as error:
            logger.debug("a reader's control connection ended: %s", error)
        except asyncio.CancelledError:
            if not self._closing:
                raise  # else it was `close`, and a stream's task that ends as cancelled is logged as an error
        finally:
            self._connections.discard(task)
            self._unauthenticated.discard(channel)
            self._readers.discard(channel)
            await channel.close()

    async def _greet(self, channel: Channel) -> bool:
        """The owner's half of the handshake. False: the reader was told why."""
        ours = nonce()
        channel.send(Hello(VERSION, ours))
        async with asyncio.timeout(HANDSHAKE_S):
            theirs = msgspec.msgpack.decode(await channel.receive(STRANGER_BYTES), type=Prove)
        expected = theirs.incarnation or ""
        if theirs.version != VERSION:
            channel.send(Refused(f"the owner speaks version {VERSION} of the lease protocol, not {theirs.version}"))
            return False
        if not proves(theirs.proof, proof(self._secret, b"control reader", ours, theirs.nonce, expected)):
            channel.send(Refused("reader and owner do not share one secret"))
            return False
        peer = self._address()
        if theirs.incarnation not in (None, peer.incarnation):
            channel.send(Refused(f"{expected} has gone; {peer.worker} is {peer.incarnation} now", lost=True))
            return False
        if len(self._readers) >= self._max_readers:
            channel.send(Refused(f"{peer.worker} {too_many_readers(self._max_readers)}", full=True))
            return False
        self._unauthenticated.discard(channel)
        self._readers.add(channel)
        channel.send(Welcome(proof(self._secret, b"control owner", ours, theirs.nonce, peer.incarnation), peer))
        return True

    async def _serve(self, channel: Channel) -> None:
        watches: set[asyncio.Task[None]] = set()
        try:
            while True:
                request = msgspec.msgpack.decode(await channel.receive(FRAME_BYTES), type=Request)
                if isinstance(request, Release):
                    await self._reply(channel, request.number, self._release(request))
                    continue
                if len(watches) >= MAX_REQUESTS:
                    raise ConnectionError(f"more than {MAX_REQUESTS} watches at once")
                task = asyncio.create_task(self._reply(channel, request.number, self._watch(request)))
                watches.add(task)
                task.add_done_callback(watches.discard)
        finally:
            for task in tuple(watches):
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, request: Watch) -> Reply:
        timeout_s = min(MAX_WATCH_S, max(0.0, request.timeout_s))
        have, pieces = request.have_blocks, request.pieces
        progress = await self._source.watch(request.lease, request.epoch, have, timeout_s, pieces)
        return Answer(request.number, progress)

    async def _release(self, request: Release) -> Reply:
        self._source.release(request.lease, request.epoch)
        return Released(request.number)

    async def _reply(self, channel: Channel, number: int, outcome: Coroutine[None, None, Reply]) -> None:
        """Every request is answered, whatever became of it."""
        reply: Reply
        try:
            reply = await outcome
        except LeaseLost as error:
            reply = Failed(number, str(error), lease_lost=True)
        except TransferError as error:
            reply = Failed(number, str(error), lease_lost=False)
        except Exception as error:
            logger.exception("a lease request failed")
            reply = Failed(number, f"the owner failed: {type(error).__name__} {error}", lease_lost=False)
        channel.send(reply)
        await channel.drain()


class ControlClient:
    """The reader's end of one connection to one incarnation. Owned by whoever connected it; `close` it."""

    def __init__(self, channel: Channel, peer: PeerAddress, on_lost: Callable[[], None] | None) -> None:
        self.peer = peer
        self._channel = channel
        self._on_lost = on_lost
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next = 0
        self._lost: PeerLost | None = None
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        secret: bytes,
        *,
        expected_incarnation: str | None = None,
        deadline_s: float = 5.0,
        on_lost: Callable[[], None] | None = None,
    ) -> "ControlClient":
        """Meet an owner; `on_lost` is called once if the connection breaks later, not when we close it.

        Raises `PeerLost` (nobody there, or another incarnation), `PeerRefused` (secret, version),
        `TransportUnavailable` (as many readers as may be), `TransferTimeout`.
        """
        where = f"the owner at {host}:{port}"
        channel: Channel | None = None
        try:
            async with patient_timeout(deadline_s):
                channel = Channel(*await asyncio.open_connection(host, port))
                peer = await _prove(channel, secret, expected_incarnation, where)
        except BaseException as error:
            if channel:
                await channel.close()
            if isinstance(error, TimeoutError):
                raise TransferTimeout(f"{where} did not answer within {deadline_s} s") from error
            if isinstance(error, msgspec.MsgspecError):
                raise PeerRefused(f"{where} does not speak the lease protocol: {error}") from error
            if isinstance(error, BROKEN):
                raise unreachable(where, error) from error
            raise
        return cls(channel, peer, on_lost)

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress:
        """How far the owner is, once it is further than `have_blocks`, with digests of `pieces`. Extends the lease.

        Raises `LeaseLost`.
        """
        watch = Watch(self._number(), lease, epoch, have_blocks, timeout_s, pieces)
        reply = await self._call(watch, timeout_s + GRACE_S)
        if not isinstance(reply, Answer):
            raise PeerRefused(f"{self.peer.worker} answered a watch with {type(reply).__name__}")
        return reply.progress

    async def release(self, lease: str, epoch: int, *, timeout_s: float = GRACE_S) -> None:
        """End the lease. Raises `LeaseLost` when it was not valid any more: then nothing read under it counts."""
        reply = await self._call(Release(self._number(), lease, epoch), timeout_s)
        if not isinstance(reply, Released):
            raise PeerRefused(f"{self.peer.worker} answered a release with {type(reply).__name__}")

    async def close(self) -> None:
        self._on_lost = None
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._lose("we closed the connection")
        await self._channel.close()

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _call(self, request: Request, timeout_s: float) -> Reply:
        if self._lost:
            raise PeerLost(str(self._lost))
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = answer
        try:
            self._channel.send(request)
            async with patient_timeout(timeout_s):
                reply = await answer
        except TimeoutError as error:
            raise TransferTimeout(f"{self.peer.worker} did not answer within {timeout_s:.1f} s") from error
        finally:
            self._waiting.pop(request.number, None)
        if isinstance(reply, Failed):
            raise (LeaseLost if reply.lease_lost else TransferError)(f"{request.lease}: {reply.reason}")
        return reply

    async def _listen(self) -> None:
        try:
            while True:
                reply = msgspec.msgpack.decode(await self._channel.receive(FRAME_BYTES), type=Reply)
                answer = self._waiting.pop(reply.number, None)
                if answer and not answer.done():
                    answer.set_result(reply)
        except BROKEN as error:
            self._lose(str(error) or "the connection was cut")
            await self._channel.close()

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        self._lost = PeerLost(f"{self.peer.worker} ({self.peer.incarnation}) is gone: {why}")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(PeerLost(str(self._lost)))
        if self._on_lost:
            self._on_lost()


async def _prove(channel: Channel, secret: bytes, expected: str | None, where: str) -> PeerAddress:
    """The reader's half of the handshake."""
    hello = msgspec.msgpack.decode(await channel.receive(STRANGER_BYTES), type=Hello)
    ours = nonce()
    given = proof(secret, b"control reader", hello.nonce, ours, expected or "")
    channel.send(Prove(VERSION, ours, given, expected))
    answer = msgspec.msgpack.decode(await channel.receive(FRAME_BYTES), type=Welcome | Refused)
    if isinstance(answer, Refused):
        kind = PeerLost if answer.lost else TransportUnavailable if answer.full else PeerRefused
        raise kind(f"{where} refused us: {answer.reason}")
    incarnation = answer.peer.incarnation
    if not proves(answer.proof, proof(secret, b"control owner", hello.nonce, ours, incarnation)):
        raise PeerRefused(f"{where} does not know the cluster's secret")
    return answer.peer
