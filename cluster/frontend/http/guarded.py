"""A guarded HTTP server: an application that asks for a key before anything is read, and TLS that follows its files.

What is good is `cluster.frontend.auth`'s business. Probes need no key, and neither do the files of the page at /ui.
"""

import ssl

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.frontend.auth import Guard, KeyRefused, TenantRefused
from cluster.frontend.http.failures import failure_of
from cluster.frontend.http.reply import failed
from cluster.frontend.http.ui.routes import FILES

OPEN = ("/health", "/ready", "/ui/", *FILES)
TENANT = b"x-diptych-tenant"


class Guarded:
    """An ASGI application around another, which finds a key's tenant in the header of tenants. Owned by the server."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN:
            headers = dict(scope["headers"])
            key, named = headers.get(b"authorization"), headers.get(TENANT, b"").decode("latin-1")
            try:
                tenant = self._guard.tenant(None if key is None else key.decode("latin-1"), named)
            except (KeyRefused, TenantRefused) as error:
                await failed(failure_of(error, ready=True))(scope, receive, send)
                return
            others = [pair for pair in scope["headers"] if pair[0] != TENANT]
            scope = {**scope, "headers": [*others, (TENANT, tenant.encode("latin-1"))]}
        await self._app(scope, receive, send)


def following(guard: Guard) -> ssl.SSLContext:
    """For a server's socket: each handshake has what the guard's files hold by then. Only for a guard with TLS."""
    first = guard.tls
    assert first is not None, "there is TLS to follow"

    def renewed(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        now = guard.tls
        assert now is not None, "a guard with TLS keeps it"
        connection.context = now.context

    first.context.sni_callback = renewed
    return first.context
