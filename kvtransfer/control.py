"""The lease protocol between a reader and an owner: one authenticated connection, many calls on it.

    watch -> Progress        a long poll and a heartbeat: the owner extends the lease with each
    release -> None          succeeds only while the lease is valid, which proves all earlier reads valid

The same connection lends blocks: to the caller, the owner is a lender.

    borrow -> loan           the lender reads the ticket's blocks from the caller, and keeps them
    attend -> state          attention of the caller's query over these blocks
    renew -> loans           a loan that is neither used nor renewed expires; these should be repaid
    offer -> ticket          a lease of the loan's blocks, to read them back or to let another lender read them
    repay -> None

Knows leases and peers; knows no KV bytes and no frames (`kvtransfer.rpc`).
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import structs

import kvtransfer.errors
from diptych.watchdog import patient_timeout
from kvtransfer.errors import (
    LoanRefused,
    PeerLost,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
    unreachable,
)
from kvtransfer.rpc.connection import RpcConnection, RpcProtocol
from kvtransfer.rpc.frames import BROKEN, FrameStream, greet
from kvtransfer.rpc.handshake import CallerHandshake, too_many_readers
from kvtransfer.rpc.listener import RpcListener
from kvtransfer.rpc.methods import Methods, answer, replies, request_types
from kvtransfer.ticket import PeerAddress, Piece, Progress, SpanQuery, TransferTicket

MAX_WATCH_S = 60.0
GRACE_S = 2.0  # for a reply, beyond the time that the call itself may take


LEASES: Methods = {
    "watch": (
        {
            "lease": str,
            "epoch": int,
            "have_blocks": int,
            "timeout_s": float,
            "pieces": tuple[Piece, ...],  # for which the reader needs digests
        },
        Progress,
    ),
    "release": ({"lease": str, "epoch": int}, None),
}
# `loan`: the number of the caller's loan, whose first `held_tokens` it uses; 0: a new one.
LOANS: Methods = {
    "borrow": ({"ticket": TransferTicket, "loan": int, "held_tokens": int}, int),
    "attend": ({"loan": int, "num_tokens": int, "query": SpanQuery}, bytes),
    "renew": ({"loans": tuple[int, ...]}, tuple[int, ...]),
    "offer": ({"loan": int, "num_tokens": int}, TransferTicket),
    "repay": ({"loan": int}, None),
}
REQUESTS = request_types({**LEASES, **LOANS})
LEASE_PROTOCOL = RpcProtocol(
    name="lease",
    calls=replies(REQUESTS, {**LEASES, **LOANS}),
    messages=(),
    errors=(kvtransfer.errors,),
    other_error=TransferError,
    lost_error=PeerLost,
    max_frame_bytes=16 << 20,  # see `digest.MAX_DIGESTS`
    max_calls=1024,
)


class LeaseSource(Protocol):
    """The owner's leases, as the control server needs them: see `workers.transfer.lease_server.LeaseServer`."""

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress: ...
    def release(self, lease: str, epoch: int) -> None: ...


class ControlServer:
    """The owner's end. `address` is called for every handshake, because a rebuilt transport changes it.

    `max_readers` bounds connected readers; unauthenticated peers have a separate bound. `lender` has the methods of
    `LOANS`, which raise `TransferError`; None: it lends no blocks.
    """

    def __init__(
        self,
        source: LeaseSource,
        address: Callable[[], PeerAddress],
        secret: bytes,
        *,
        max_readers: int = 256,
        lender: object | None = None,
    ) -> None:
        self._source = source
        self._lender = lender
        self._address = address
        self._max_readers = max_readers
        self._listener = RpcListener(LEASE_PROTOCOL.name, secret, self._admit, self._serve)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Disconnect all readers; their calls end with `PeerLost`. Leases are not touched."""
        await self._listener.close()

    def _admit(self, incarnation: str) -> bytes:
        peer = self._address()
        if incarnation not in ("", peer.incarnation):
            raise PeerLost(f"{incarnation} has ended; {peer.worker} is {peer.incarnation} now")
        if self._listener.num_callers >= self._max_readers:
            raise TransportUnavailable(f"{peer.worker} {too_many_readers(self._max_readers)}")
        return msgspec.msgpack.encode(peer)

    async def _serve(self, incarnation: str, stream: FrameStream) -> None:
        connection = RpcConnection(stream, LEASE_PROTOCOL, f"the reader at {stream.peer_host}", on_call=self._on_call)
        try:
            await connection.run()
        finally:
            await connection.close()

    async def _on_call(self, request: Any) -> Any:
        method = type(request).__name__
        if method == "watch":
            request = structs.replace(request, timeout_s=min(MAX_WATCH_S, max(0.0, request.timeout_s)))
        if method in LEASES:
            return await answer(self._source, request)
        if self._lender is None:
            raise LoanRefused(f"{self._address().worker} does not lend blocks; ask another worker", "failed")
        return await answer(self._lender, request)


class ControlClient:
    """The reader's end of one connection to one incarnation. Owned by the connecting side; `close` it."""

    def __init__(self, stream: FrameStream, peer: PeerAddress, on_lost: Callable[[], None] | None) -> None:
        self.peer = peer
        name = f"{peer.worker} ({peer.incarnation})"
        self._connection = RpcConnection(
            stream, LEASE_PROTOCOL, name, on_lost=lambda _: on_lost() if on_lost is not None else None
        )
        self._running = asyncio.ensure_future(self._connection.run())

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
        """Connect to an owner; `on_lost` is called once if the connection breaks later, not when we close it.

        Raises `PeerLost` (no listener, or another incarnation), `PeerRefused` (secret, version),
        `TransportUnavailable` (too many readers), `TransferTimeout`.
        """
        where = f"the owner at {host}:{port}"
        handshake = CallerHandshake(LEASE_PROTOCOL.name, secret, expected_incarnation or "", where)
        stream: FrameStream | None = None
        try:
            async with patient_timeout(deadline_s):
                stream = await FrameStream.connect(host, port)
                welcome = await greet(stream, handshake, LEASE_PROTOCOL.max_frame_bytes)
            peer = msgspec.msgpack.decode(welcome, type=PeerAddress)
        except BaseException as error:
            if stream:
                await stream.close()
            if isinstance(error, TimeoutError):
                raise TransferTimeout(f"{where} did not answer within {deadline_s} s") from error
            if isinstance(error, BROKEN):
                raise unreachable(where, error) from error
            raise
        return cls(stream, peer, on_lost)

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress:
        """The owner's progress beyond `have_blocks`, with digests of `pieces`. Extends the lease.

        Raises `LeaseLost`.
        """
        arguments = lease, epoch, have_blocks, timeout_s, pieces
        progress: Progress = await self._call("watch", arguments, timeout_s + GRACE_S)
        return progress

    async def release(self, lease: str, epoch: int) -> None:
        """End the lease. Raises `LeaseLost` if it was no longer valid; then nothing read under it may be used."""
        await self._call("release", (lease, epoch))

    async def borrow(self, ticket: TransferTicket, loan: int, held_tokens: int, timeout_s: float) -> int:
        """Let the peer read and keep the ticket's blocks; returns the loan's number. Raises `LoanRefused`."""
        number: int = await self._call("borrow", (ticket, loan, held_tokens), timeout_s)
        return number

    async def attend(self, loan: int, num_tokens: int, query: SpanQuery, timeout_s: float) -> bytes:
        """Attend to the KV of the loan's first `num_tokens` tokens; returns the state after it. Raises `LeaseLost`."""
        state: bytes = await self._call("attend", (loan, num_tokens, query), timeout_s)
        return state

    async def renew(self, loans: tuple[int, ...]) -> tuple[int, ...]:
        """Extend those of these loans that have not ended; returns those that should be repaid."""
        recalled: tuple[int, ...] = await self._call("renew", (loans,))
        return recalled

    async def offer(self, loan: int, num_tokens: int) -> TransferTicket:
        """A lease of the loan's first `num_tokens` tokens. Raises `LeaseLost`."""
        ticket: TransferTicket = await self._call("offer", (loan, num_tokens))
        return ticket

    async def repay(self, loan: int) -> None:
        """End a loan, if there is one."""
        await self._call("repay", (loan,))

    async def close(self) -> None:
        await self._connection.close()
        await self._running

    async def _call(self, method: str, arguments: tuple[Any, ...], timeout_s: float = GRACE_S) -> Any:
        try:
            return await self._connection.call(REQUESTS[method](*arguments), timeout_s)
        except TimeoutError as error:
            raise TransferTimeout(f"{self.peer.worker} did not answer within {timeout_s:.1f} s") from error
