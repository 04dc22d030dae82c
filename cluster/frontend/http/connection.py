"""What every request with a body goes through before and around the application: its bounds and its end.

    client ── whole body, see `Arriving` ──> application ──> client
    client gone ──> application cancelled, wherever it waits

Knows ASGI; knows no request.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.http.arriving import Arriving
from cluster.frontend.http.failures import Failure
from cluster.frontend.http.reply import failed

RETRY_AFTER_S = 1.0

FULL = Failure(
    429, "too many requests are in flight in this gateway; try again", "no_room", retry_after_s=RETRY_AFTER_S
)
TWO_LENGTHS = Failure(400, "Content-Length and Transfer-Encoding are both given; send one of them", "invalid_request")
ENCODED = Failure(
    415, "a Content-Encoding is not supported; send the body uncompressed", "unsupported_encoding", "content-encoding"
)
CLOSING = Failure(503, "this gateway is closing; try another one", "closing", retry_after_s=RETRY_AFTER_S)


class Connection:
    """An ASGI application around another. At most `most_requests` whose body has arrived are in it at once.

    Owned by the server.
    """

    def __init__(self, app: ASGIApp, arriving: Arriving, most_requests: int, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._most_requests = most_requests
        self._is_closing = is_closing
        self._arriving = arriving
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def ended(self, timeout_s: float) -> None:
        """Return when no request is in it, or after this time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # a proxy may see other requests in these bytes
            await _last(TWO_LENGTHS)(scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server leaves the body out
            await self._app({**scope, "method": method}, receive, send)
            return
        refusal = self._refusal()
        if refusal is None and _is_encoded(scope["headers"]):
            refusal = failed(ENCODED)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = await self._arriving.read(scope, receive)
        if body is None:
            return
        refusal = failed(body) if isinstance(body, Failure) else self._refusal()
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        assert isinstance(body, bytes), "failures are refusals"
        replayed = _Replayed(body)
        del body  # large ones must not stay for as long as the answer takes
        self._running += 1
        self._idle.clear()
        try:
            await self._converse(scope, receive, send, replayed)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _refusal(self) -> Response | None:
        """What a request hears that cannot begin now."""
        if self._is_closing():
            return _last(CLOSING)  # the next one, perhaps through a balancer, goes elsewhere
        return failed(FULL) if self._running >= self._most_requests else None

    async def _converse(self, scope: Scope, receive: Receive, send: Send, body: "_Replayed") -> None:
        working = asyncio.create_task(self._answer(scope, body, send))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.wait((working, leaving))
        if not working.cancelled():
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


def _is_encoded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-encoding" and value.strip().lower() != b"identity" for name, value in headers)


def _last(failure: Failure) -> Response:
    """The refusal after which the server closes the connection."""
    refusal = failed(failure)
    refusal.headers["connection"] = "close"
    return refusal


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
