"""What every request with a body goes through before and around the application: its bounds and its end.

    client ── body, at most MOST_BYTES within BODY_S ──> application ── replies, each taken within SEND_S ──> client
    client gone ──> application cancelled, wherever it waits

Knows ASGI; knows no request.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.failures import Failure
from cluster.http.reply import failed
from workers.alarm import Alarm

logger = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
BODY_S = 60.0
SEND_S = 60.0  # a client that takes nothing for so long is let go
RETRY_AFTER_S = 1.0

TOO_LARGE = Failure(413, f"the body has more than {MOST_BYTES >> 20} MiB; send less", "body_too_large")
TOO_SLOW = Failure(408, f"the body did not arrive within {BODY_S:.0f} s", "body_too_slow")
FULL = Failure(
    429, "too many requests are in flight in this gateway; try again", "no_room", retry_after_s=RETRY_AFTER_S
)
CLOSING = Failure(503, "this gateway is closing; try another one", "closing", retry_after_s=RETRY_AFTER_S)


class Connection:
    """An ASGI application around another. At most `most_requests` with a body are in it at once. Owned by the door.

    `cut` ends a connection without a word, by its client's address: what a client does not take cannot be flushed.
    """

    def __init__(
        self, app: ASGIApp, most_requests: int, is_closing: Callable[[], bool], cut: Callable[[object], None]
    ) -> None:
        self._app = app
        self._most_requests = most_requests
        self._is_closing = is_closing
        self._cut = cut
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def ended(self, timeout_s: float) -> None:
        """Return when no request is in it, or after this time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server leaves the body out
            await self._app({**scope, "method": method}, receive, send)
            return
        if self._is_closing():
            refusal = failed(CLOSING)
            refusal.headers["connection"] = "close"  # the next one, perhaps through a balancer, goes elsewhere
            await refusal(scope, receive, send)
            return
        if self._running >= self._most_requests:
            await failed(FULL)(scope, receive, send)
            return
        self._running += 1
        self._idle.clear()
        try:
            await self._converse(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_S):
                body = await _read(scope, receive)
        except TimeoutError:
            body = TOO_SLOW
        if body is None:
            return
        if isinstance(body, Failure):
            await failed(body)(scope, receive, send)
            return
        patient = _Patient(send, lambda: working.cancel())
        working = asyncio.create_task(self._answer(scope, _Replayed(body), patient))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            patient.close()
            for task in (working, leaving):
                task.cancel()
            await asyncio.wait((working, leaving))
        if patient.is_over:
            logger.info("a client took nothing for %.0f s and was let go", SEND_S)
            self._cut(scope["client"])
        elif not working.cancelled():
            working.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Replayed:
    """A `Receive` that has the whole body already; after it nothing comes."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # until cancelled: the connection itself watches for the client's end
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Patient:
    """A `Send` with an end to its patience: then it has whoever sends cancelled. To be closed."""

    def __init__(self, send: Send, cancel: Callable[[], object]) -> None:
        self.is_over = False
        self._send = send
        self._cancel = cancel
        self._alarm = Alarm(self._lose)  # not a timer for each token

    async def __call__(self, message: Message) -> None:
        self._alarm.set(SEND_S)
        await self._send(message)
        self._alarm.off()

    def _lose(self) -> None:
        self.is_over = True
        self._cancel()

    def close(self) -> None:
        self._alarm.close()


async def _read(scope: Scope, receive: Receive) -> bytes | Failure | None:
    """The whole body, or why not; None when the client left before its end."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if int(declared) > MOST_BYTES:  # h11 has checked that it is a number
        return TOO_LARGE
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            return TOO_LARGE
        if not message.get("more_body", False):
            return bytes(body)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
