"""Numbered calls and one-way messages on an authenticated connection, for asyncio.

    call(request) ── CALL ──> on_call(request) ── REPLY | ERROR ──> its result or error    many at once, in any order
    notify(message) ── MESSAGE ──> on_message(message)                                     in the order sent

Both ends may send calls and messages, if their `RpcProtocol` has any. When the connection breaks, all waiting and later
calls fail at once.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_
from types import ModuleType
from typing import Any

import msgspec

from kvtransfer.rpc.frames import MAX_NUMBER, FrameStream, Kind, ProtocolError
from kvtransfer.rpc.session import SessionStream

logger = logging.getLogger(__name__)

KEEPALIVE_S = 1.0
TICK_S = 0.25  # timeouts are counted in ticks of this event loop; a late tick counts once


@dataclass(frozen=True)
class RpcProtocol:
    """The calls, messages and errors between two ends: msgspec types, and errors sent by name.

    `calls` maps each type of request (a tagged Struct) to the type of its reply. An error whose class is in one of
    `errors`' modules, or one of `errors` itself, arrives as the same class with the same arguments, any other as
    `other_error`. Calls on a broken connection fail with `lost_error`.
    """

    name: str
    calls: Mapping[type[msgspec.Struct], Any]
    messages: tuple[type[msgspec.Struct], ...]
    errors: tuple[ModuleType | type[Exception], ...]
    other_error: type[Exception]
    lost_error: type[Exception]
    max_frame_bytes: int
    max_calls: int  # in flight; an end that serves this many stops reading

    @cached_property
    def requests(self) -> "msgspec.msgpack.Decoder[Any]":
        return msgspec.msgpack.Decoder(reduce(or_, self.calls))

    @cached_property
    def one_way(self) -> "msgspec.msgpack.Decoder[Any]":
        return msgspec.msgpack.Decoder(reduce(or_, self.messages))

    @cached_property
    def error_classes(self) -> dict[str, type[Exception]]:
        found = (vars(each).values() if isinstance(each, ModuleType) else (each,) for each in self.errors)
        kinds = (kind for kinds in found for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
        return {kind.__name__: kind for kind in kinds}


@dataclass(slots=True)
class _Call:
    """A call of this end. `ticks`: until its timeout; 0: there is none, or it has passed."""

    reply_type: Any
    ticks: int
    reply: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            observe(self.reply)  # perhaps nobody awaits it


class _Named(msgspec.Struct, frozen=True):
    """What every call has in common."""

    type: str


class _Failure(msgspec.Struct, frozen=True):
    error: str  # the name of its class
    reason: str
    args: tuple[str | int | float, ...] | None = None  # of its constructor; None: they cannot be sent


class RpcConnection:
    """One end. Owned by its creator: `run` it until it ends, then `close` it.

    `on_lost` is called once with the error that calls fail with, unless this end closed the connection.
    """

    def __init__(
        self,
        stream: FrameStream | SessionStream,
        protocol: RpcProtocol,
        peer: str,
        *,
        on_call: Callable[[Any], Awaitable[Any]] | None = None,
        on_message: Callable[[Any], object] | None = None,
        on_lost: Callable[[Exception], None] | None = None,
    ) -> None:
        self._stream = stream
        self._protocol = protocol
        self._peer = peer
        self._on_call = on_call
        self._on_message = on_message
        self._on_lost = on_lost
        self._number = 0
        self._calls: dict[int, _Call] = {}  # without a reply
        self._ticker: asyncio.TimerHandle | None = None  # while a call has a timeout
        self._serving: set[asyncio.Task[None]] = set()
        self._keeping_alive: asyncio.Task[None] | None = None
        self._silent_s = 0.0
        self.patience_s = 0.0
        self.error: Exception | None = None  # once the connection is lost or closed

    async def run(self) -> None:
        """Serve the peer's frames until the connection ends, for whatever reason."""
        self._stream.deliver(self._take, self._protocol.max_frame_bytes)
        error = await asyncio.shield(self._stream.ended)
        self._lose(_reason(error))

    def begin(self, request: msgspec.Struct, timeout_s: float = math.inf) -> "asyncio.Future[Any]":
        """Send a call at once; the future has its reply, its error, or TimeoutError at most two ticks late.

        The timeout does not count pauses of this event loop. A cancelled future drops the reply, not the call.
        """
        call = _Call(self._protocol.calls[type(request)], math.ceil(timeout_s / TICK_S) if timeout_s < math.inf else 0)
        if self.error is not None:
            call.fail(self.error)
        elif len(self._calls) >= self._protocol.max_calls:
            call.fail(self._protocol.other_error(f"{self._peer} leaves {len(self._calls)} calls unanswered"))
        else:
            self._number = self._number % MAX_NUMBER + 1
            self._calls[self._number] = call
            self._stream.send(Kind.CALL, self._number, msgspec.msgpack.encode(request))
            if call.ticks and self._ticker is None:
                self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return call.reply

    async def call(self, request: msgspec.Struct, timeout_s: float) -> Any:
        """`begin`, and wait. Raises TimeoutError or the call's error."""
        return await self.begin(request, timeout_s)

    def _tick(self) -> None:
        self._ticker = None
        waiting = [call for call in self._calls.values() if call.ticks]
        for call in waiting:
            call.ticks -= 1
            if not call.ticks:
                call.fail(TimeoutError())
        if waiting:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def notify(self, message: msgspec.Struct) -> None:
        if self.error is None:
            self._stream.send(Kind.MESSAGE, 0, msgspec.msgpack.encode(message))

    def keep_alive(self, message: Callable[[], msgspec.Struct], patience_s: float) -> None:
        """Send a message every second from now on; the connection is lost when the peer is silent for `patience_s`.

        Both ends call it. Silence is counted in messages that this end has sent, so a process that was itself stopped
        does not treat its peer as lost.
        """
        self.patience_s = patience_s
        self._keeping_alive = asyncio.ensure_future(self._keep_alive(message))

    def disconnect(self, error: Exception) -> None:
        """Disconnect at once: all calls fail with `error`."""
        if self.error is None:
            self._fail(error)
            self._stream.abort()

    async def close(self) -> None:
        """Fail calls of this end, cancel calls served here, flush, and disconnect."""
        if self.error is None:
            self._fail(self._lost("is disconnected: this end closed the connection"))
        tasks = (*self._serving, *([self._keeping_alive] if self._keeping_alive else []))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stream.close()

    def _lose(self, reason: str) -> None:
        if self.error is None:
            error = self._lost(reason)
            self.disconnect(error)
            if self._on_lost:
                self._on_lost(error)

    def _lost(self, reason: str) -> Exception:
        return self._protocol.lost_error(f"{self._peer} {reason}")

    def _fail(self, error: Exception) -> None:
        self.error = error
        for call in self._calls.values():
            call.fail(error)
        self._calls.clear()
        if self._ticker is not None:
            self._ticker.cancel()

    def _take(self, kind: int, number: int, body: bytes) -> None:
        self._silent_s = 0.0
        if kind == Kind.CALL and self._on_call:
            task = asyncio.ensure_future(self._serve(number, self._request(body)))
            self._serving.add(task)
            task.add_done_callback(self._served)
            if len(self._serving) >= self._protocol.max_calls:
                self._stream.pause()
        elif kind == Kind.MESSAGE and self._on_message:
            self._on_message(self._protocol.one_way.decode(body))
        elif kind in (Kind.REPLY, Kind.ERROR) and number in self._calls:
            call = self._calls[number]
            outcome = msgspec.msgpack.decode(body, type=call.reply_type if kind == Kind.REPLY else _Failure)
            del self._calls[number]
            if isinstance(outcome, _Failure):
                call.fail(self._received_error(outcome))
            elif not call.reply.done():  # its caller is still there
                call.reply.set_result(outcome)
        else:
            raise ProtocolError(f"it sent a frame of kind {kind} and number {number}, which is not expected")

    def _served(self, task: "asyncio.Task[None]") -> None:
        is_full = len(self._serving) >= self._protocol.max_calls
        self._serving.discard(task)
        if is_full and self.error is None:
            self._stream.resume()

    def _request(self, body: bytes) -> Any:
        """A call, or the error that answers one which this release does not know. Raises `DecodeError` for garbage."""
        try:
            return self._protocol.requests.decode(body)
        except msgspec.ValidationError as error:
            msgspec.msgpack.decode(body, type=_Named)
            return error

    async def _serve(self, number: int, request: Any) -> None:
        """Serve one call. It gets a reply or an error, unless it is one that this peer must not make."""
        assert self._on_call is not None
        kind = Kind.REPLY
        try:
            if isinstance(request, Exception):
                raise request
            body = msgspec.msgpack.encode(await self._on_call(request))
        except ProtocolError as error:
            return self._lose(_reason(error))
        except Exception as error:
            kind, body = Kind.ERROR, msgspec.msgpack.encode(self._sent_error(error))
        if self.error is None:
            self._stream.send(kind, number, body)
            await self._stream.drain()

    def _sent_error(self, error: Exception) -> _Failure:
        name, reason = type(error).__name__, str(error).strip()
        if name in self._protocol.error_classes and all(isinstance(each, str | int | float) for each in error.args):
            return _Failure(name, reason, error.args)
        logger.error("a call from %s failed", self._peer, exc_info=error)
        return _Failure(name, reason.partition("\n")[0])

    def _received_error(self, failure: _Failure) -> Exception:
        kind = self._protocol.error_classes.get(failure.error)
        with suppress(TypeError):  # another release may have other arguments
            if kind is not None and failure.args is not None:
                return kind(*failure.args)
        return self._protocol.other_error(f"{self._peer}: {failure.error}: {failure.reason}")

    async def _keep_alive(self, message: Callable[[], msgspec.Struct]) -> None:
        while self._silent_s < self.patience_s:
            self.notify(message())
            self._silent_s += KEEPALIVE_S
            await asyncio.sleep(KEEPALIVE_S)
        self._lose(f"was silent for {self.patience_s:.0f} s: its process is stopped, or its node is unreachable")


def observe(done: "asyncio.Future[Any]") -> None:
    """Mark a future's error as retrieved, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "disconnected: its process died, or its node is unreachable"
    if isinstance(error, OSError):
        return f"cannot be reached any more: {error}"
    return f"broke the protocol: {type(error).__name__}: {error}"
