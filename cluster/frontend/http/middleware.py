"""ASGI applications around the application: request ids, API keys, and the response counter. Owned by the HTTP server.

x-request-id: trace/7      echoed in every response; a service mesh may give many requests the same one
trace-7-1b9f03e2           unique: what gateway, workers and logs call the request, and part of the answer's `id`
"""

import secrets
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.auth import Guard, KeyRefused, TenantRefused
from cluster.frontend.http.failures import failure_of
from cluster.frontend.http.ui.routes import FILES
from cluster.observe.metrics.responses import Responses
from diptych.request_ids import is_usable, made_id

NAME = "diptych.name"  # keys in a scope
ENDING = "diptych.ending"
REQUEST_ID = b"x-request-id"
TENANT = b"x-diptych-tenant"
LONGEST_NAME = 100  # of a client's name; leaves room for suffixes that tell requests, prompts and answers apart
OPEN_PATHS = ("/health", "/ready", "/ui/", *FILES)  # need no key
ROUTES = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
CLIENT_LEFT = 499  # before the end of its response


@dataclass(slots=True)
class Ending:
    """How a response ends; a stream that fails after its status was sent reports it here."""

    status: int = CLIENT_LEFT


class CountResponses:
    """Counts responses by route and status, including those of the layers in between."""

    def __init__(self, app: ASGIApp, responses: Responses) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ending, is_complete = Ending(), False

        async def watched(message: Message) -> None:
            nonlocal is_complete
            await send(message)
            if message["type"] == "http.response.start":
                ending.status = message["status"]
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)

        try:
            await self._app({**scope, ENDING: ending}, receive, watched)
        finally:
            status = ending.status if is_complete else CLIENT_LEFT
            method = ROUTES.get(scope["path"], "other")
            if method != "other" or status >= 400:  # probes and scrapes are no load
                self._responses.count("http", method, str(status))


@dataclass(frozen=True, slots=True)
class Name:
    """`given` by the client, else generated; `unique` begins with it, with unusable characters replaced."""

    given: str
    unique: str

    @property
    def is_kept(self) -> bool:
        """Whether a search for `given` finds `unique`."""
        return self.unique.startswith(self.given)


def name_of(given: str) -> Name:
    """`given`: the client's x-request-id; empty if there is none."""
    if not given:
        generated = made_id()
        return Name(generated, generated)
    kept = "".join(letter if is_usable(letter) else "-" for letter in given[:LONGEST_NAME])
    return Name(given, f"{kept}-{secrets.token_hex(4)}")


class NameRequests:
    """Names each request, and echoes the name in the headers of every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = name_of(dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1"))
        echoed = (REQUEST_ID, name.given.encode("latin-1"))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], echoed]}
            await send(message)

        await self._app({**scope, NAME: name}, receive, named)


class RequireKey:
    """Refuses requests without a valid key, before their bodies are read. The key sets the tenant header."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            key, named = headers.get(b"authorization"), headers.get(TENANT, b"").decode("latin-1")
            try:
                tenant = self._guard.tenant(None if key is None else key.decode("latin-1"), named)
            except (KeyRefused, TenantRefused) as error:
                await failure_of(error, ready=True).response()(scope, receive, send)
                return
            others = [pair for pair in scope["headers"] if pair[0] != TENANT]
            scope = {**scope, "headers": [*others, (TENANT, tenant.encode("latin-1"))]}
        await self._app(scope, receive, send)
