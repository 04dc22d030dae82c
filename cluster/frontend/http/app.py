"""The HTTP routes. Knows paths and statuses; the gateway knows text, tokens, SLOs and cancellation."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from email.message import Message
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cluster.events import ClusterError
from cluster.frontend.context import GatewayContext
from cluster.frontend.gateway import Gateway, servable
from cluster.frontend.grpc.services import metrics_text
from cluster.frontend.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    MalformedBody,
    TokenizeBody,
)
from cluster.frontend.http.failures import JSON, Failure, failure_of
from cluster.frontend.http.formats import ChatFormat, CompletionFormat, Echo
from cluster.frontend.http.headers import parse_headers
from cluster.frontend.http.messages_body import CountTokensBody, MessagesBody, count_tokens_json
from cluster.frontend.http.messages_wire import MessagesWire
from cluster.frontend.http.middleware import NAME
from cluster.frontend.http.openapi import route_options
from cluster.frontend.http.preprocess import (
    detokenize,
    items_of,
    read_detokenize,
    read_generation,
    read_previous_id,
    read_response,
    read_tokenize,
    tokenize,
)
from cluster.frontend.http.reply import ParsedRequest, Reply
from cluster.frontend.http.response_store import History, ResponseStore, size_of
from cluster.frontend.http.responses_body import Item, ResponsesBody
from cluster.frontend.http.responses_wire import ResponsesWire
from cluster.frontend.http.ui.routes import add_ui
from cluster.frontend.http.wire import OpenAIWire, Wire
from cluster.frontend.preprocessing import LARGE_BYTES
from cluster.frontend.text import EncodedPrompt, PromptInput, TextPrompt, TokenPrompt, text_from
from cluster.frontend.tools.answer_plan import AnswerPlan, AnswerPlanner
from cluster.observe.trace_context import set_trace_headers
from workers.errors import InvalidRequest
from workers.log_fields import log_fields

logger = logging.getLogger(__name__)

READY_RETRY_S = 1.0
GENERATIONS: Mapping[str, type[Generation | MessagesBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
}
RESPONSES = "/v1/responses"
READERS = {"/tokenize": read_tokenize, "/detokenize": read_detokenize}
LARGE = {"/tokenize": 1024, "/detokenize": 512}  # bytes that take as long as `LARGE_BYTES` of a prompt: 5 ms


def make_app(context: GatewayContext, gateway: Gateway, is_closing: Callable[[], bool]) -> FastAPI:
    """The application of one gateway."""
    quiet = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False}
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None, telemetry=quiet)  # type: ignore[arg-type]
    app.state.routes = routes = _Routes(context, gateway, is_closing)
    for path, handler in (
        ("/v1/completions", routes.completions),
        ("/v1/chat/completions", routes.chat),
        ("/v1/responses", routes.responses),
        ("/v1/messages", routes.messages),
        ("/v1/messages/count_tokens", routes.count_tokens),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
    ):
        app.router.add_api_route(path, handler, **route_options(path, "POST"), route_class_override=_BodyRoute)
    for path, query in (
        ("/v1/models", routes.models),
        ("/v1/models/", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/metrics", routes.metrics),
        ("/version", routes.version),
        ("/tokenizer_info", routes.tokenizer_info),
    ):
        app.add_api_route(path, query, **route_options(path, "GET"))
    add_ui(app, context, gateway)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(MalformedBody, _malformed)
    app.add_exception_handler(HTTPException, _no_route)
    for kind in (InvalidRequest, ClusterError, Exception):
        app.add_exception_handler(kind, routes.failed)
    return app


class _BodyRoute(APIRoute):
    """A route whose large bodies are parsed outside the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle_small = super().get_route_handler()

        async def handle(request: Request) -> Response:
            raw = await request.body()
            if len(raw) > LARGE.get(request.scope["path"], LARGE_BYTES) and _is_json(request.headers):
                response: Response | None = await request.app.state.routes.large(request, raw)
                if response is not None:
                    return response
            return await handle_small(request)

        return handle


class _Routes:
    """Owned by the application."""

    def __init__(self, context: GatewayContext, gateway: Gateway, is_closing: Callable[[], bool]) -> None:
        self._context = context
        self._gateway = gateway
        self._is_closing = is_closing
        self._started_s = int(time.time())
        self._encoding = asyncio.Semaphore(1)
        self._responses = ResponseStore()

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        prompts, has_logprobs = _prompts(body, request), body.wanted_logprobs is not None
        if not body.echo:
            form = CompletionFormat(self._gateway.tokenizer, has_logprobs)
            return self._reply(body, prompts, AnswerPlan(), request, self._openai(body, request, form))
        self._gateway.check_model(body.model or "")
        echoes = [await self._echo(each, body.wanted_tokens or 1) for each in prompts]
        form = CompletionFormat(self._gateway.tokenizer, has_logprobs, echoes, body.n or 1)
        prompts = [TokenPrompt(each.tokens) for each in echoes]
        return self._reply(body, prompts, AnswerPlan(), request, self._openai(body, request, form))

    async def _echo(self, prompt: PromptInput, num_output: int) -> Echo:
        tokens = await self._gateway.encode(prompt, num_output)
        if isinstance(prompt, TextPrompt | EncodedPrompt):
            return Echo(prompt.text, tokens)
        return Echo(text_from(self._gateway.tokenizer, tokens), tokens)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        prompts, plan = await self._planned(body, body, request)
        form = ChatFormat(self._gateway.tokenizer, bool(body.logprobs), plan.make_parser)
        return self._reply(body, prompts, plan, request, self._openai(body, request, form))

    async def messages(self, body: MessagesBody, request: Request) -> Response:
        prompts, plan = await self._planned(body.chat, body, request)
        wire = MessagesWire(request.scope[NAME].unique, self._gateway.name_of(body.model), plan.make_parser)
        return self._reply(body, prompts, plan, request, wire)

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        tenant = parse_headers(request.headers, request.scope[NAME]).tenant
        history = self._responses.history(tenant, body.previous_response_id)
        if not hasattr(request.state, "items") and size_of(history) > LARGE_BYTES:
            await self._read_response(request, body.model_dump_json(exclude_unset=True).encode(), history)
        items: bytes | None = getattr(request.state, "items", None)
        chat = body.chat_after(items_of(history) if items is None else ())  # the prompt is encoded, if there are items
        prompts, plan = await self._planned(chat, chat, request)
        name = f"resp_{request.scope[NAME].unique}"

        def keep(output: list[Item]) -> None:
            if body.store is not False:
                new = json.dumps(body.items).encode() if items is None else items
                self._responses.keep(tenant, name, history, (new, json.dumps(output).encode()))

        repeated = body.repeated(chat.sampling(self._gateway.default_sampling))
        wire = ResponsesWire(name, self._gateway.name_of(body.model), repeated, plan.make_parser, keep)
        return self._reply(chat, prompts, plan, request, wire)

    async def _read_response(self, request: Request, raw: bytes, history: History) -> dict[str, Any]:
        """The fields of a large conversation's request; its prompt and items become those of `request.state`."""
        gateway, size = self._gateway, len(raw) + size_of(history)
        call = gateway.preprocessing.call
        read = await call(size, read_response, raw, history, gateway.bounds, gateway.default_sampling)
        request.state.prompts, request.state.items = read.prompts, read.items
        return read.fields

    async def count_tokens(self, body: CountTokensBody, request: Request) -> Response:
        (prompt,), _ = await self._planned(body.chat, body, request)
        tokens = prompt.tokens if isinstance(prompt, TokenPrompt) else await self._gateway.encode(prompt)
        return Response(count_tokens_json(len(tokens)), media_type=JSON)

    async def _planned(
        self, body: ChatBody, given: ChatBody | MessagesBody, request: Request
    ) -> tuple[Sequence[PromptInput], AnswerPlan]:
        """The prompt, and how its answers are read. `given`: the body that the client sent."""
        tools, prompts = body.tool_request, _prompts(given, request)
        if not self._planner.needs_prompt:
            return prompts, self._planner.plan(tools)
        self._gateway.check_model(body.model or "")
        with given.client_errors():
            (tokens,) = [await self._gateway.encode(each, body.wanted_tokens or 1) for each in prompts]
        return [TokenPrompt(tokens)], self._planner.plan(tools, tokens)

    @cached_property
    def _planner(self) -> AnswerPlanner:
        spec = self._context.spec.gateway
        return AnswerPlanner(self._gateway.tokenizer, spec.tool_call_parser, spec.reasoning_parser)

    def _openai(self, body: Generation, request: Request, form: CompletionFormat | ChatFormat) -> OpenAIWire:
        return OpenAIWire(
            form,
            request.scope[NAME].unique,
            self._gateway.name_of(body.model),
            stream=bool(body.stream),
            include_usage=body.include_usage,
            usage_in_chunks=body.usage_in_chunks,
        )

    def _reply(
        self,
        body: Generation | MessagesBody,
        prompts: Sequence[PromptInput],
        plan: AnswerPlan,
        request: Request,
        wire: Wire,
    ) -> Response:
        headers = parse_headers(request.headers, request.scope[NAME])
        if self._gateway.traces:
            set_trace_headers(request.headers.items())
        if not headers.name.is_prefix:
            more = log_fields(self._context.name, headers.name.unique)
            logger.info("request %s has x-request-id %.500r", headers.name.unique, headers.name.given, extra=more)
        sampling = body.sampling(self._gateway.default_sampling)
        parsed = ParsedRequest(
            prompts,
            sampling if plan.grammar is None else replace(sampling, grammar=plan.grammar),
            headers,
            model=body.model or "",
            client_names=body.client_names,
            stream=bool(body.stream),
            scores_only=isinstance(body, CompletionBody) and body.scores_only,
            keep=plan.keep,
        )
        return Reply(self._gateway, parsed, wire, self._encoding)

    async def tokenize(self, body: TokenizeBody) -> Response:
        self._gateway.check_model(body.model or "")
        return Response(tokenize(self._gateway.tokenizer, body, self._gateway.bounds), media_type=JSON)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        self._gateway.check_model(body.model or "")
        return Response(detokenize(self._gateway.tokenizer, body, self._gateway.bounds), media_type=JSON)

    async def large(self, request: Request, raw: bytes) -> Response | None:
        """The response to a large body; None: the route continues with a small body and the encoded prompts."""
        gateway, path = self._gateway, request.scope["path"]
        call = gateway.preprocessing.call
        if path in READERS:
            model, answer = await call(len(raw), READERS[path], raw, gateway.bounds)
            gateway.check_model(model)
            return Response(answer, media_type=JSON)
        if path == RESPONSES:
            tenant = parse_headers(request.headers, request.scope[NAME]).tenant
            history = self._responses.history(tenant, await call(len(raw), read_previous_id, raw))
            request._json = await self._read_response(request, raw, history)
            request._body = b"{}"
            return None
        body = await call(len(raw), read_generation, GENERATIONS[path], raw, gateway.bounds, gateway.default_sampling)
        request._json, request.state.prompts = body.fields, body.prompts
        request._body = b"{}"  # frees the large body; FastAPI checks that there is one
        return None

    async def models(self) -> Response:
        names = ["", *self._context.dispatcher.adapters]
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, name: str) -> Response:
        return _json(self._model(name))

    async def health(self) -> Response:
        """Liveness: the process responds."""
        return _json({"status": "up"})

    async def ready(self) -> Response:
        """Readiness: a worker is ready, and the server is not closing."""
        if self._is_closing() or not servable(self._gateway.view):
            why = "this gateway is closing" if self._is_closing() else "no worker is ready"
            return Failure(503, why, "not_ready", retry_after_s=READY_RETRY_S).response()
        return _json({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(await metrics_text(self._context, self._gateway), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        return _json({"version": _version()})

    async def tokenizer_info(self) -> Response:
        return _json(dict(self._gateway.tokenizer.info))

    def _model(self, name: str) -> dict[str, Any]:
        """An adapter has the model that it changes as its `parent`. Raises `UnknownModel`."""
        model = self._context.model
        found = self._gateway.name_of(name)
        return {
            "id": found,
            "object": "model",
            "parent": None if found == model.name else model.name,
            "created": self._started_s,
            "owned_by": "diptych",
            "max_model_len": self._gateway.max_model_len,
            "default_sampling_params": self._gateway.default_sampling,
        }

    async def failed(self, request: Request, error: Exception) -> Response:
        return failure_of(error, servable(self._gateway.view), request.scope[NAME].unique).response(
            request.scope["path"]
        )


async def _malformed(request: Request, error: Exception) -> Response:
    """Reports the first error in a body."""
    if isinstance(error, RequestValidationError):
        first, *_ = errors = error.errors()
        if first["type"] == "json_invalid":
            error = MalformedBody.not_json(first["ctx"]["error"])
        else:  # each path begins with "body"
            error = MalformedBody.of([each | {"loc": each["loc"][1:]} for each in errors], error.body)
    assert isinstance(error, MalformedBody)
    return Failure(400, error.message, "invalid_request", error.path or None).response(request.scope["path"])


def _prompts(body: Generation | MessagesBody, request: Request) -> Sequence[PromptInput]:
    """The prompts; those of a large body are already encoded."""
    encoded: Sequence[PromptInput] | None = getattr(request.state, "prompts", None)
    return body.prompts() if encoded is None else encoded


def _is_json(headers: Mapping[str, str]) -> bool:
    """By the same rule as FastAPI."""
    kind = Message()
    kind["content-type"] = headers.get("content-type", "")
    subtype = kind.get_content_subtype()
    return kind.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        400: "the body cannot be read as JSON",
        404: f"there is nothing at {request.url.path[:80]}",
        405: f"{request.method} is not possible here",
    }
    message = messages.get(error.status_code, str(error.detail))
    return Failure(error.status_code, message, "invalid_request").response(**error.headers or {})  # Allow


def _version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:
        return "not installed"


def _json(value: dict[str, Any]) -> Response:
    return Response(json.dumps(value), media_type=JSON)
