"""gRPC interceptors: a time limit for the request message, API keys, errors as statuses, and the response counter."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_status import rpc_status

from cluster.frontend.auth import Authenticator, KeyRefused
from cluster.frontend.gateway import servable
from cluster.frontend.grpc.address_limit import AddressLimit
from cluster.frontend.grpc.sender import OutputNotTaken, Sender, abort
from cluster.frontend.grpc.statuses import code_name, status_of
from cluster.frontend.served_models import ServedModels
from diptych.wire import ADMIN, INFERENCE
from workers.errors import InvalidRequest

HEALTH = f"/{health.SERVICE_NAME}/"  # needs no key, because probes and load balancers have none
MESSAGE_S = 60.0  # from the start of a call until its request message has arrived, as for HTTP bodies
MAX_OTHER_CALLS_PER_ADDRESS = 512  # without a request message yet, or with a single answer; beside as many as may run
KINDS = ("unary_unary", "unary_stream", "stream_stream")
Details = grpc.HandlerCallDetails
Handler = Any  # grpc's own type takes no parameters at run time
Behavior = Callable[[Any, Any], Awaitable[Any]]


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose request message, or a stream's next, does not arrive in `MESSAGE_S`. grpc waits forever.

    A client that does not take the only answer of a call in `SEND_S` is disconnected: `close` gets its peer and ends
    the connection, as nothing else ends a call that cannot send. Meanwhile the calls of an address are limited; it may
    begin `max_requests` at once.
    """

    def __init__(self, max_requests: int, close: Callable[[str], None]) -> None:
        self._close = close
        self._limit = AddressLimit(max_requests + MAX_OTHER_CALLS_PER_ADDRESS)

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is not None and isasyncgenfunction(handler.stream_stream):  # reflection: the only stream of requests
            return handler._replace(stream_stream=_stream_ended_in_time(handler.stream_stream, self._limit))
        if handler is None or handler.request_streaming:  # a refused call reads no message
            return handler

        async def behave(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with self._limit.held(context):
                request = await _message(context)
                if handler.unary_unary is not None:
                    return await self._send(await handler.unary_unary(request, context), context)
            await handler.unary_stream(request, context)

        return grpc.stream_stream_rpc_method_handler(behave, handler.request_deserializer, handler.response_serializer)

    async def _send(self, answer: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            await Sender(context).send(answer)
        except OutputNotTaken:
            await asyncio.to_thread(self._close, context.peer())
            raise asyncio.CancelledError from None  # as when a client leaves


async def _message(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    try:
        async with asyncio.timeout(MESSAGE_S):
            request = await context.read()
    except TimeoutError:
        rule = f"the request message did not arrive within {MESSAGE_S:g} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, rule)
    if request is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request message")
    return request


def _stream_ended_in_time(
    inner: Callable[[Any, Any], AsyncIterator[Any]], limit: AddressLimit
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def in_time(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                async with asyncio.timeout(MESSAGE_S):
                    message = await anext(messages)
            except (TimeoutError, StopAsyncIteration):
                return
            yield message

    async def behave(messages: Any, context: Any) -> AsyncIterator[Any]:
        async with limit.held(context):
            async for response in inner(in_time(aiter(messages)), context):
                yield response

    return behave


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Requires an API key in the metadata of every call except those of the health service."""

    def __init__(self, guard: Authenticator) -> None:
        self._guard = guard

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        details: Any = handler_call_details
        if not details.method.startswith(HEALTH):
            try:
                self._guard.check(dict(details.invocation_metadata).get("authorization"))
            except KeyRefused as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: KeyRefused) -> Handler:
    """A handler for every kind of call: on the wire, all of them are streams."""

    async def refuse(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(rpc_status.to_status(status_of(error, ready=True)))

    return grpc.stream_stream_rpc_method_handler(refuse)


class Undecodable:
    """Replaces a request message that could not be decoded."""


class ResponseInterceptor(grpc.aio.ServerInterceptor):
    """Turns errors into statuses, and counts responses by code. Outermost, so that it counts refused keys, too."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        service, _, method = details.method.strip("/").partition("/")
        if handler is None or service not in (INFERENCE, ADMIN):
            return handler
        kind = next(each for each in KINDS if getattr(handler, each) is not None)
        counted = self._counted(method, getattr(handler, kind), counts_ok=service == INFERENCE)
        return handler._replace(**{kind: counted, "request_deserializer": _tolerant(handler.request_deserializer)})

    def _counted(self, method: str, inner: Behavior, *, counts_ok: bool) -> Behavior:
        async def behave(request: Any, context: Any) -> Any:
            code = grpc.StatusCode.UNKNOWN.name
            try:
                response = await self._call(inner, request, context)
                code = grpc.StatusCode.OK.name
                return response
            except grpc.aio.AbortError:
                status = context.code()
                code = status.name if isinstance(status, grpc.StatusCode) else code_name(status)
                raise
            except asyncio.CancelledError:  # the client left, or its deadline passed
                code = grpc.StatusCode.CANCELLED.name
                raise
            finally:
                if counts_ok or code != grpc.StatusCode.OK.name:  # successful status queries are not counted
                    self._models.responses.count("grpc", method, code)

        return behave

    async def _call(self, inner: Behavior, request: Any, context: Any) -> Any:
        try:
            if isinstance(request, Undecodable):
                raise InvalidRequest("message", "cannot be decoded; it is truncated, or not of the schema diptych.v1")
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            await abort(context, status_of(cause, servable(self._models.view)))


def _tolerant(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Passes undecodable messages on; grpc's own error would be the name of a Python class."""
    if decode is None:
        return None

    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except Exception:
            return Undecodable()

    return decoded
