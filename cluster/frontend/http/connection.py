"""Reads the bodies of requests, limits how many run, and cancels the application when a client disconnects.

    client ── whole body, see `BodyReader` ──> application ──> client
    client disconnects ──> the application is cancelled, wherever it waits

Bodies have limits: size and time of each, memory of all together and per client address. Knows ASGI; knows no request.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
MAX_BODY_BYTES = 16 << 20
JSON_BYTES = 6  # most bytes of JSON per byte of a prompt: \u0000
FIELDS_BYTES = 1 << 20  # of a body without its prompt
# Paths of bodies with one prompt; others may have several.
ONE_PROMPT = {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"}
BODY_S = 60.0
FREE_BYTES = 64 << 10  # of each body, not counted, so that large bodies cannot crowd out small ones
MAX_UNREAD_BYTES = 256 << 20  # of all bodies that have not arrived completely
MAX_UNREAD_BYTES_PER_ADDRESS = 64 << 20

TOO_LARGE = Failure(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB; send less", "body_too_large")
TOO_SLOW = Failure(408, f"the body did not arrive within {BODY_S:.0f} s", "body_too_slow")
CROWDED = Failure(
    429, "too many large bodies arrive at this gateway at once; try again", "no_room", retry_after_s=RETRY_AFTER_S
)


@dataclass(frozen=True, slots=True)
class _Limit:
    max_bytes: int
    failure: Failure  # of a larger body


def _one_prompt_limit(longest_text_bytes: int | None, context_length: int) -> _Limit:
    if longest_text_bytes is None or JSON_BYTES * longest_text_bytes + FIELDS_BYTES >= MAX_BODY_BYTES:
        return _Limit(MAX_BODY_BYTES, TOO_LARGE)
    limit = JSON_BYTES * longest_text_bytes + FIELDS_BYTES
    why = f"This model's maximum context length is {context_length} tokens; a body of {limit} bytes or more cannot fit"
    return _Limit(limit, Failure(400, f"{why}; shorten it", "context_length_exceeded"))


class BodyReader:
    """Owned by its `Connection`.

    `models`: of each, the bytes of the longest text that can fit into its context (None: unknown), and the tokens of
    that. The largest limit holds, since the model is only known when the body is read.
    """

    def __init__(self, models: Iterable[tuple[int | None, int]]) -> None:
        self._one_prompt = max((_one_prompt_limit(*each) for each in models), key=lambda limit: limit.max_bytes)
        self._unread: Counter[str] = Counter()

    async def read(self, scope: Scope, receive: Receive) -> bytes | Failure | None:
        """The whole body, or the error; None if the client disconnected first."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        limit = self._one_prompt if scope["path"] in ONE_PROMPT else _Limit(MAX_BODY_BYTES, TOO_LARGE)
        if int(declared) > limit.max_bytes:  # h11 checks that it is a number
            return limit.failure
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(scope["client"][0] if scope["client"] else "", receive, limit)
        except TimeoutError:
            return TOO_SLOW

    async def _read(self, host: str, receive: Receive, limit: _Limit) -> bytes | Failure | None:
        body, counted = bytearray(), 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > limit.max_bytes:
                    return limit.failure
                if not message.get("more_body", False):
                    return bytes(body)
                more = max(len(body) - FREE_BYTES, 0) - counted
                self._unread[host] += more
                counted += more
                if more and self._is_crowded(host):
                    return CROWDED
        finally:
            self._unread[host] -= counted
            if not self._unread[host]:
                del self._unread[host]

    def _is_crowded(self, host: str) -> bool:
        return self._unread[host] > MAX_UNREAD_BYTES_PER_ADDRESS or self._unread.total() > MAX_UNREAD_BYTES


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
