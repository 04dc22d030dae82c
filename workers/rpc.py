"""A worker's calls over one connection: the protocol, and the caller's end. `workers.rpc_server` is the other end.

    call        ──>  the methods of `Worker`, many at once
    subscribe   ──>  a call that lasts; until it ends, outputs come back as messages

The frames are those of `kvtransfer.rpc`. A session belongs to one incarnation of a worker, and survives a reconnect.
Knows no runtime: whoever starts the worker tells callers its host and port.
"""

import asyncio
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import kvtransfer.errors
import workers.errors
from diptych.shapes import Shape, Timings
from diptych.watchdog import patient_timeout
from kvtransfer.rpc.connection import RpcConnection, RpcProtocol
from kvtransfer.rpc.frames import FrameStream, greet
from kvtransfer.rpc.handshake import CallerHandshake
from kvtransfer.rpc.methods import Methods, replies, request_types
from kvtransfer.rpc.session import SessionStream, SessionTarget
from kvtransfer.ticket import LinkReport, PeerAddress, TransferTicket
from workers.errors import WorkerClosed, WorkerError
from workers.kv_events import KVEvents
from workers.request import EngineOutputs, Request, Reservation

MAX_CALLS = 1 << 14  # of one caller, unanswered; each request has a few
MAX_FRAME_BYTES = 256 << 20  # a prompt takes five bytes a token, a whole cache's events nine a block
CONNECT_S = 5.0
RESUME_S = 1.0  # to connect again, before the worker counts as lost

DEFAULTS = {"cut_tokens": 0, "starts_decoding": False, "lenders": ()}  # of parameters
METHODS: Methods = {  # parameters and result, as in `Worker`
    "connect": ({"peer": PeerAddress}, LinkReport),
    "address": ({}, PeerAddress),
    "reserve": ({"request": Request, "timeout_s": float}, Reservation),
    "prefill": ({"request": Request, "cut_tokens": int}, None),
    "generate": ({"request": Request, "lenders": tuple[PeerAddress, ...]}, None),
    "fetch": ({"key": str, "ticket": TransferTicket | None, "starts_decoding": bool}, None),
    "decode": ({"key": str, "tokens": tuple[int, ...]}, None),
    "offer_migration": ({"key": str, "most_tokens": int}, TransferTicket | None),
    "hold_prefix": ({"request": Request}, TransferTicket | None),
    "fetch_prefix": ({"request": Request, "ticket": TransferTicket, "timeout_s": float}, int),
    "warm": ({"request": Request, "ttl_s": float, "timeout_s": float}, int),
    "unpin": ({"request": Request | None}, int),
    "cache_since": ({"last": int, "reach": int}, KVEvents),
    "cancel": ({"key": str}, None),
    "holds": ({"key": str}, bool),
    "subscribe": ({"subscriber": str}, None),
    "check": ({}, None),
    "measure": ({"shape": Shape, "repeats": int}, Timings),
}
CALLS = request_types(METHODS, DEFAULTS)
WORKER_PROTOCOL = RpcProtocol(
    name="worker",
    calls=replies(CALLS, METHODS),
    messages=(EngineOutputs,),
    errors=(workers.errors, kvtransfer.errors, AssertionError),
    other_error=WorkerError,
    lost_error=WorkerClosed,
    max_frame_bytes=MAX_FRAME_BYTES,
    max_calls=MAX_CALLS,
)


class WorkerConnection:
    """A session with one incarnation of a worker, over a Unix socket on one host and TCP between hosts. `close` it.

    It survives a lost connection if the next one is made within `RESUME_S`. Calls on a lost session raise `lost`.
    `on_outputs` gets the messages of the subscription.
    """

    def __init__(
        self, stream: SessionStream, name: str, lost: type[Exception], on_outputs: Callable[[EngineOutputs], object]
    ) -> None:
        protocol = replace(WORKER_PROTOCOL, lost_error=lost)
        self._connection = RpcConnection(stream, protocol, name, on_message=on_outputs)
        self._running = asyncio.ensure_future(self._connection.run())

    @classmethod
    async def open(
        cls,
        name: str,
        host: str,
        port: int,
        secret: bytes,
        incarnation: str,
        lost: type[Exception],
        on_outputs: Callable[[EngineOutputs], object],
    ) -> "WorkerConnection":
        """Raises a `TransferError` that says why it is not admitted, OSError, EOFError or TimeoutError."""
        session = uuid.uuid4().hex

        async def connect(number: int, received: int) -> tuple[FrameStream, int]:
            target = SessionTarget(incarnation, session, number, received).encode()
            async with patient_timeout(CONNECT_S):
                stream = await _connect(host, port, incarnation)
                try:
                    return stream, int(await greet(stream, CallerHandshake(WORKER_PROTOCOL.name, secret, target, name)))
                except BaseException:
                    await stream.close()
                    raise

        stream, _ = await connect(0, 0)
        return cls(SessionStream(stream, RESUME_S, connect), name, lost, on_outputs)

    def call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> "asyncio.Future[Any]":
        """What the worker's method returns or raises, or TimeoutError."""
        return self._connection.begin(CALLS[method](*args), timeout_s)

    async def subscribe(self, subscriber: str) -> None:
        """Run until the subscription ends. Raises what `Worker.subscribe` raises."""
        await self._connection.begin(CALLS["subscribe"](subscriber))

    async def close(self) -> None:
        await self._connection.close()
        await self._running


async def _connect(host: str, port: int, incarnation: str) -> FrameStream:
    if sys.platform == "linux":
        with suppress(OSError):  # it runs on another host, or in another network namespace
            return await FrameStream.connect_on_host(socket_name(incarnation))
    return await FrameStream.connect(host, port)


def socket_name(incarnation: str) -> str:
    """The name of this worker's Unix socket."""
    return f"diptych-worker-{incarnation}"
