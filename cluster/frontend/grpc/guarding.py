"""A guarded gRPC server: its TLS credentials, and the interceptor that asks for a key. `cluster.frontend.auth`
decides which key is good. The health service is open to all: probes and load balancers have no key.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_status import rpc_status

from cluster.frontend.auth import Guard, KeyRefused, Tls
from cluster.frontend.grpc.statuses import status_of

OPEN = f"/{health.SERVICE_NAME}/"
Details = grpc.HandlerCallDetails
Handler = Any  # grpc's own type takes no parameters where it runs


def credentials(guard: Guard) -> grpc.ServerCredentials | None:
    """Of the guard's files, as they are at each new connection. None: without TLS."""
    first = guard.tls
    if first is None:
        return None
    shown = first

    def renewed() -> Any:
        """None: as before."""
        nonlocal shown
        now = guard.tls
        if now is None or now is shown:
            return None
        shown = now
        return _configuration(now)

    asks = first.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(first), renewed, require_client_authentication=asks)


def _configuration(tls: Tls) -> Any:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.client_ca)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Every call but those of the health service needs a key in its metadata. Owned by the server."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        details: Any = handler_call_details
        if not details.method.startswith(OPEN):
            try:
                self._guard.check(dict(details.invocation_metadata).get("authorization"))
            except KeyRefused as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: KeyRefused) -> Handler:
    """On the wire all calls are streams, so this answers each kind."""

    async def refuse(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(rpc_status.to_status(status_of(error, ready=True)))

    return grpc.stream_stream_rpc_method_handler(refuse)
