"""What a request is called: by its client, in `x-request-id`, and in here, where no two may have one name.

    x-request-id: trace/7      told in every answer as it came; a service mesh gives many requests the same
    trace-7-1b9f03e2           what gateway, workers and logs call it, and the answer's `id`

Knows ASGI; knows no route.
"""

import secrets
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.request_ids import is_usable, made_id

HEADER = b"x-request-id"
KEY = "diptych.name"  # in a scope
LONGEST = 100  # of what is kept of a client's name; room is left for what tells requests, prompts and answers apart


@dataclass(frozen=True, slots=True)
class Name:
    """`given` by the client, or else made; `unique` begins with it, as far as ids may have its letters."""

    given: str
    unique: str

    @property
    def is_kept(self) -> bool:
        """Whether who looks for the one finds the other."""
        return self.unique.startswith(self.given)


class Named:
    """An ASGI application around another: whatever is answered, its headers have the id. Owned by the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = name_of(dict(scope["headers"]).get(HEADER, b"").decode("latin-1"))
        shown = name.given.encode("latin-1")

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER, shown)]}
            await send(message)

        await self._app({**scope, KEY: name}, receive, named)


def name_of(given: str) -> Name:
    """Of a request whose client calls it so; empty: it says nothing."""
    if not given:
        made = made_id()
        return Name(made, made)
    kept = "".join(letter if is_usable(letter) else "-" for letter in given[:LONGEST])
    return Name(given, f"{kept}-{secrets.token_hex(4)}")
