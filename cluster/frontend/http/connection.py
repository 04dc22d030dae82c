"""Reads the bodies of requests, limits how many run, and cancels the application when a client disconnects.

    client ── whole body, see `BodyReader` ──> application ──> client
    client disconnects ──> the application is cancelled, wherever it waits

Knows ASGI; knows no request.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.http.body_reader import BodyReader
from cluster.frontend.http.failures import Failure

RETRY_AFTER_S = 1.0
REST_S = 2.0  # for the rest of a refused body

FULL = Failure(
    429, "too many requests are in flight in this gateway; try again", "no_room", retry_after_s=RETRY_AFTER_S
)
TWO_LENGTHS = Failure(400, "Content-Length and Transfer-Encoding are both given; send one of them", "invalid_request")
ENCODED = Failure(
    415, "a Content-Encoding is not supported; send the body uncompressed", "unsupported_encoding", "content-encoding"
)
CLOSING = Failure(503, "this gateway is closing; try another one", "closing", retry_after_s=RETRY_AFTER_S)


class Connection:
    """ASGI middleware. At most `max_requests` with a body run at once. Owned by the HTTP server."""

    def __init__(self, app: ASGIApp, bodies: BodyReader, max_requests: int, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._bodies = bodies
        self._max_requests = max_requests
        self._is_closing = is_closing
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request runs, at most this long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # request smuggling: a proxy may parse it differently
            await TWO_LENGTHS.response(connection="close")(scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            method = "GET" if scope["method"] == "HEAD" else scope["method"]  # uvicorn omits the body of a HEAD
            await self._app({**scope, "method": method}, receive, send)
            return
        refusal = self._refusal()
        if refusal is None and _is_encoded(scope["headers"]):
            refusal = ENCODED.response()
        if refusal is not None:
            await _refuse(refusal, scope, receive, send)
            return
        body = await self._bodies.read(scope, receive)
        if body is None:
            return
        if isinstance(body, Failure):
            await _refuse(body.response(), scope, receive, send)
            return
        if (refusal := self._refusal()) is not None:
            await refusal(scope, receive, send)
            return
        replayed = _Replayed(body)
        del body  # frees a large body while the request runs
        self._running += 1
        self._idle.clear()
        try:
            await self._run(scope, receive, send, replayed)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _refusal(self) -> Response | None:
        """The error response if no request may start now."""
        if self._is_closing():
            return CLOSING.response(connection="close")  # so that the next request can reach another gateway
        return FULL.response() if self._running >= self._max_requests else None

    async def _run(self, scope: Scope, receive: Receive, send: Send, body: "_Replayed") -> None:
        async def answer() -> None:
            await self._app(scope, body, send)

        answering = asyncio.create_task(answer())
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
        if not answering.cancelled():
            answering.result()


async def _refuse(refusal: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the response, then take the rest of the body: closing over unread bytes resets the connection, and the
    client may lose the response.
    """

    async def begin(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await refusal(scope, receive, begin)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REST_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body"})


class _Replayed:
    """A `Receive` that returns the whole body once."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # until cancelled: `Connection` watches for the disconnect
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _is_encoded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-encoding" and value.strip().lower() != b"identity" for name, value in headers)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
