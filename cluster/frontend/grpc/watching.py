"""What every call of our own gRPC services goes through.

A message that cannot be read is the caller's mistake, and each answer is counted by its code.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_status import rpc_status

from cluster.frontend.grpc.statuses import code_name, status_of
from cluster.observe.metrics.responses import Responses
from diptych.wire import ADMIN, INFERENCE
from workers.errors import InvalidRequest

Details = grpc.HandlerCallDetails
Handler = Any  # grpc's own type takes no parameters where it runs
Behaviour = Callable[[Any, Any], Awaitable[Any]]
KINDS = ("unary_unary", "unary_stream", "stream_stream")


class Unreadable:
    """Stands for a message that was none."""


class WatchInterceptor(grpc.aio.ServerInterceptor):
    """Around all others, so that their refusals count. Owned by the server."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        service, _, method = details.method.strip("/").partition("/")
        if handler is None or service not in (INFERENCE, ADMIN):
            return handler
        kind = next(each for each in KINDS if getattr(handler, each) is not None)
        watched = self._watched(method, getattr(handler, kind), counts_ok=service == INFERENCE)
        return handler._replace(**{kind: watched, "request_deserializer": _patient(handler.request_deserializer)})

    def _watched(self, method: str, inner: Behaviour, *, counts_ok: bool) -> Behaviour:
        async def behave(request: Any, context: Any) -> Any:
            code = grpc.StatusCode.UNKNOWN.name
            try:
                if isinstance(request, Unreadable):
                    why = "cannot be read; it is cut off, or written by another schema than diptych.v1"
                    status = status_of(InvalidRequest("message", why), ready=True)
                    await context.abort_with_status(rpc_status.to_status(status))
                answer = await inner(request, context)
                code = grpc.StatusCode.OK.name
                return answer
            except grpc.aio.AbortError:
                told = context.code()
                code = told.name if isinstance(told, grpc.StatusCode) else code_name(told)
                raise
            except asyncio.CancelledError:  # the client has gone, or its deadline has passed
                code = grpc.StatusCode.CANCELLED.name
                raise
            finally:
                if counts_ok or code != grpc.StatusCode.OK.name:  # looks are no load
                    self._responses.count("grpc", method, code)

        return behave


def _patient(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Reports undecodable messages to the behavior; grpc's own answer would be the name of a Python class."""
    if decode is None:
        return None

    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except Exception:
            return Unreadable()

    return decoded
