"""How long a server waits for a client that takes no output. Knows grpc's contexts; knows no request."""

import asyncio
import contextlib
from typing import Any, NoReturn

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

SEND_S = 60.0  # a client that takes nothing for so long loses its request
LAST_WORD_S = 0.5

Context = grpc.aio.ServicerContext[Any, Any]


class OutputNotTaken(Exception):
    """The client read nothing for `SEND_S`."""

    def __init__(self) -> None:
        super().__init__(f"the client took no output for {SEND_S:g} s; read the stream, or ask for less")


class Sender:
    """The messages of one call, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._over = False

    async def send(self, message: Any) -> None:
        """Returns when the window of the stream has let the message through. Raises `OutputNotTaken`, then always."""
        if self._over:
            raise OutputNotTaken  # grpc has one place for a message that waits, and it is taken
        try:
            async with asyncio.timeout(SEND_S):
                await self._context.write(message)
        except TimeoutError:
            self._over = True
            raise OutputNotTaken from None


async def abort(context: Context, status: Status) -> NoReturn:
    """End the call. A status behind output that is not taken stays with grpc, and comes to a client that reads again.

    Raises grpc's `AbortError`.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORD_S):
            await context.abort_with_status(rpc_status.to_status(status))
    await context.write(b"")  # raises, since the call is aborted
    raise AssertionError("an aborted call cannot be written to")
