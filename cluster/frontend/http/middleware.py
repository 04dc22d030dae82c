"""ASGI middleware: request names, API keys, and the response counter. Owned by the HTTP server.

x-request-id: trace/7      the client's name, echoed in every response; several requests may share it
trace-7-1b9f03e2           the unique id in gateway, workers and logs, and part of the answer's `id`
"""

import secrets
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.auth import Authenticator, KeyRefused, TenantRefused
from cluster.frontend.http.failures import failure_of
from cluster.frontend.http.ui.routes import FILES
from cluster.observe.metrics.gateway import Responses
from diptych.request_ids import is_usable, new_id

NAME = "diptych.name"  # keys in an ASGI scope
WRITER = "diptych.writer"
OUTCOME = "diptych.outcome"
REQUEST_ID = b"x-request-id"
TENANT = b"x-diptych-tenant"
MAX_NAME_CHARS = 100  # of a client's name; leaves room for the suffixes of requests, prompts and answers
ANTHROPIC_KEY = b"x-api-key"
OPEN_PATHS = ("/health", "/ready", "/ui/", *FILES)  # need no key
ROUTES = {  # that read a body: their names in metrics, which are those of methods of `ModelRoutes`
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
CLIENT_LEFT = 499  # the client disconnected before the end of its response


@dataclass(slots=True)
class Outcome:
    """The status that is counted. A stream that fails after its status was sent sets the status of its error."""

    status: int = CLIENT_LEFT


class BodyWriter(Protocol):
    """Writes parts of a response's body without waiting. The ASGI `send` starts and ends the response."""

    @property
    def is_ready(self) -> bool:
        """Whether the body has begun, and the client reads fast enough."""
        ...

    def write(self, part: bytes) -> None:
        """Write a part that is not empty. Only if `is_ready`."""
        ...


class CountResponses:
    """Counts responses by route and status, including those of the inner middleware."""

    def __init__(self, app: ASGIApp, responses: Responses) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome, is_complete = Outcome(), False

        async def counted_send(message: Message) -> None:
            nonlocal is_complete
            await send(message)
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)

        try:
            await self._app({**scope, OUTCOME: outcome}, receive, counted_send)
        finally:
            status = outcome.status if is_complete else CLIENT_LEFT
            method = ROUTES.get(scope["path"], "other")
            if method != "other" or status >= 400:  # successful probes and scrapes are not counted
                self._responses.count("http", method, str(status))


@dataclass(frozen=True, slots=True)
class RequestName:
    """`given`: the client's name, or a generated one. `unique`: the same with unusable characters replaced, and a
    random suffix.
    """

    given: str
    unique: str

    @property
    def is_prefix(self) -> bool:
        """Whether a search for `given` finds `unique`."""
        return self.unique.startswith(self.given)


def request_name(given: str) -> RequestName:
    """`given`: the client's x-request-id; empty if there is none."""
    if not given:
        generated = new_id()
        return RequestName(generated, generated)
    usable = "".join(letter if is_usable(letter) else "-" for letter in given[:MAX_NAME_CHARS])
    return RequestName(given, f"{usable}-{secrets.token_hex(4)}")


class NameRequests:
    """Names each request, and echoes the client's name in the headers of every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = request_name(dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1"))
        echoed = (REQUEST_ID, name.given.encode("latin-1"))

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], echoed]}
            await send(message)

        await self._app({**scope, NAME: name}, receive, named_send)


class RequireKey:
    """Refuses requests without a valid key, before reading their bodies. Sets the tenant header by the key."""

    def __init__(self, app: ASGIApp, guard: Authenticator) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            key, named = headers.get(b"authorization"), headers.get(TENANT, b"").decode("latin-1")
            if key is None and ANTHROPIC_KEY in headers:
                key = b"Bearer " + headers[ANTHROPIC_KEY]
            try:
                tenant = self._guard.tenant(None if key is None else key.decode("latin-1"), named)
            except (KeyRefused, TenantRefused) as error:
                await failure_of(error, ready=True).response(scope["path"])(scope, receive, send)
                return
            others = [pair for pair in scope["headers"] if pair[0] != TENANT]
            scope = {**scope, "headers": [*others, (TENANT, tenant.encode("latin-1"))]}
        await self._app(scope, receive, send)
