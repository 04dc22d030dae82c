"""Writes messages to a client with a time limit. Knows grpc's contexts; knows no request."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

SEND_S = 60.0  # the request of a client that reads nothing for this long is ended
ABORT_S = 0.5

Context = grpc.aio.ServicerContext[Any, Any]


class OutputNotTaken(Exception):
    """The client read nothing for `SEND_S`."""

    def __init__(self) -> None:
        super().__init__(f"the client read no output for {SEND_S:g} s; read the stream, or ask for less")


class Sender:
    """Sends the messages of one call, one at a time. For `send_at_once`, `encode` makes messages, and the caller enters
    the sender, which waits for the last one.
    """

    def __init__(self, context: Context, encode: Callable[[Any], Any] | None = None) -> None:
        self._context = context
        self._encode = encode
        self._over = False
        self._sending: asyncio.Task[None] | None = None  # of `send_at_once`

    def send_at_once(self, event: Any) -> bool:
        """Begin to send, without waiting. False: an earlier message is still being sent, or has failed.

        `send` raises its error.
        """
        before = self._sending
        if before is not None and (not before.done() or before.cancelled() or before.exception()):
            return False
        assert self._encode is not None, "send_at_once needs encode"
        self._sending = asyncio.create_task(self._context.write(self._encode(event)))
        return True

    async def __aenter__(self) -> "Sender":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What is being sent comes before the call's status; a call that was cancelled sends nothing more."""
        if kind is None or issubclass(kind, Exception):
            await self._finish()
        elif self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _finish(self) -> None:
        """Wait until nothing is being sent any more."""
        if (sending := self._sending) is None:
            return
        try:
            if not sending.done():
                async with asyncio.timeout(SEND_S):
                    await sending
            sending.result()
        except TimeoutError:
            self._over = True
            raise OutputNotTaken from None
        finally:
            self._sending = None

    async def send(self, message: Any) -> None:
        """Wait until flow control lets the message through. Raises `OutputNotTaken`, and then at every call."""
        if self._over:
            raise OutputNotTaken  # grpc buffers one message, and that buffer is full
        await self._finish()
        try:
            async with asyncio.timeout(SEND_S):
                await self._context.write(message)
        except TimeoutError:
            self._over = True
            raise OutputNotTaken from None


async def abort(context: Context, status: Status) -> NoReturn:
    """End the call with this status. If output before it is unread, the client gets it when it reads again.

    Raises grpc's `AbortError`, also if the client has left: `InternalError` says that nothing could be sent.
    """
    with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
        async with asyncio.timeout(ABORT_S):
            await context.abort_with_status(rpc_status.to_status(status))
    await context.write(b"")  # raises, since the call is aborted
    raise AssertionError("an aborted call cannot be written to")
