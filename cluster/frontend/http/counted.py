"""Counts HTTP responses by route and status, from the application and from the layers in front of it."""

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.observe.metrics.responses import Responses

ROUTES = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
ENDING = "diptych.ending"  # in a scope
LEFT = 499  # the client had gone before the end


@dataclass(slots=True)
class Ending:
    """How a response ends; a stream that fails after its status was sent says so here."""

    status: int = LEFT


class Counted:
    """An ASGI application around another. Owned by the server."""

    def __init__(self, app: ASGIApp, responses: Responses) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ending, is_whole = Ending(), False

        async def watched(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            if message["type"] == "http.response.start":
                ending.status = message["status"]
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body", False)

        try:
            await self._app({**scope, ENDING: ending}, receive, watched)
        finally:
            status = ending.status if is_whole else LEFT
            method = ROUTES.get(scope["path"], "other")
            if method != "other" or status >= 400:  # probes and scrapes are no load
                self._responses.count("http", method, str(status))
