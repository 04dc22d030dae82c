"""What a request is called: as its client says in `x-request-id`, or as made here. Knows ASGI."""

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
KEY = "diptych.request_id"  # in a scope


class Named:
    """An ASGI application around another: whatever is answered, its headers have the id. Owned by the door."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = dict(scope["headers"]).get(HEADER) or f"req-{secrets.token_hex(8)}".encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER, shown)]}
            await send(message)

        await self._app({**scope, KEY: shown.decode("latin-1")}, receive, named)


def id_of(scope: Scope) -> str:
    """Of a request that came through `Named`."""
    found: str = scope[KEY]
    return found
