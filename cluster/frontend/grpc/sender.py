"""Writes messages to a client with a time limit. Knows grpc's contexts; knows no request."""

import asyncio
import contextlib
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
    """Sends the messages of one call, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._over = False

    async def send(self, message: Any) -> None:
        """Wait until flow control lets the message through. Raises `OutputNotTaken`, and then at every call."""
        if self._over:
            raise OutputNotTaken  # grpc buffers one message, and that buffer is full
        try:
            async with asyncio.timeout(SEND_S):
                await self._context.write(message)
        except TimeoutError:
            self._over = True
            raise OutputNotTaken from None


async def abort(context: Context, status: Status) -> NoReturn:
    """End the call with this status. If output before it is unread, the client gets it when it reads again.

    Raises grpc's `AbortError`.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_S):
            await context.abort_with_status(rpc_status.to_status(status))
    await context.write(b"")  # raises, since the call is aborted
    raise AssertionError("an aborted call cannot be written to")
