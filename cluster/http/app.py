"""The routes: what is asked over HTTP, and which part of the gateway answers it.

Knows paths and statuses; text, tokens, promises and cancellation are the gateway's business.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cluster.api.services import metrics_text
from cluster.events import ClusterError
from cluster.gateway import Gateway, servable
from cluster.http.bodies import ChatBody, CompletionBody, DetokenizeBody, Generation, TokenizeBody
from cluster.http.failures import Failure, failure_of
from cluster.http.naming import KEY
from cluster.http.reply import JSON, Asked, Reply, failed
from cluster.http.shapes import ChatShape, CompletionShape, Echo, text_of
from cluster.http.terms import terms_of
from cluster.serving import GatewayContext
from cluster.text import GenerationInput, TextPrompt, TokenPrompt
from cluster.trace_context import came_with
from workers.errors import InvalidRequest
from workers.logged import about

logger = logging.getLogger(__name__)

READY_AGAIN_S = 1.0


def make_app(context: GatewayContext, gateway: Gateway, is_closing: Callable[[], bool]) -> FastAPI:
    """The application of one gateway."""
    quiet = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False}
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None, telemetry=quiet)  # type: ignore[arg-type]
    routes = _Routes(context, gateway, is_closing)
    for path, answer in (
        ("/v1/completions", routes.completions),
        ("/v1/chat/completions", routes.chat),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
    ):
        app.add_api_route(path, answer, methods=["POST"], response_model=None)
    for path, look in (
        ("/v1/models", routes.models),
        ("/v1/models/", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/metrics", routes.metrics),
        ("/version", routes.version),
    ):
        app.add_api_route(path, look, methods=["GET"], response_model=None)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _no_route)
    for kind in (InvalidRequest, ClusterError, Exception):
        app.add_exception_handler(kind, routes.failed)
    return app


class _Routes:
    """Owned by the application."""

    def __init__(self, context: GatewayContext, gateway: Gateway, is_closing: Callable[[], bool]) -> None:
        self._context = context
        self._gateway = gateway
        self._is_closing = is_closing
        self._started_s = int(time.time())

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        prompts, scored = body.prompts(), body.wanted_logprobs is not None
        if not body.echo:
            return self._reply(body, prompts, request, CompletionShape(self._gateway.tokenizer, scored))
        self._gateway.check_model(body.model or "")
        echoes = [await self._echo(each) for each in prompts]
        shape = CompletionShape(self._gateway.tokenizer, scored, echoes, body.n or 1)
        return self._reply(body, [TokenPrompt(each.tokens) for each in echoes], request, shape)

    async def _echo(self, prompt: GenerationInput) -> Echo:
        tokens = await self._gateway.encode(prompt)
        if isinstance(prompt, TextPrompt):
            return Echo(prompt.text, tokens)
        return Echo(await asyncio.to_thread(text_of, self._gateway.tokenizer, tokens), tokens)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        shape = ChatShape(self._gateway.tokenizer, bool(body.logprobs))
        return self._reply(body, body.prompts(), request, shape)

    def _reply(
        self, body: Generation, prompts: Sequence[GenerationInput], request: Request, shape: CompletionShape | ChatShape
    ) -> Response:
        terms = terms_of(request.headers, request.scope[KEY])
        if self._gateway.traces:
            came_with(request.headers.items())
        if not terms.name.is_kept:
            more = about(self._context.name, terms.name.unique)
            logger.info("request %s came as x-request-id %.500r", terms.name.unique, terms.name.given, extra=more)
        wants = bool(body.stream), body.include_usage, body.usage_in_chunks
        asked = Asked(
            prompts, body.sampling(self._gateway.default_sampling), terms, body.model or "", body.sent, *wants
        )
        return Reply(self._gateway, asked, shape, self._context.model.name)

    async def tokenize(self, body: TokenizeBody) -> Response:
        self._gateway.check_model(body.model or "")
        given = body.input()
        with body.named():
            tokens = await self._gateway.encode(given)
        told: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._gateway.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            tokenizer = self._gateway.tokenizer
            told["token_strs"] = await asyncio.to_thread(lambda: [text_of(tokenizer, (each,)) for each in tokens])
        return _told(told)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        self._gateway.check_model(body.model or "")
        model = self._context.model
        if len(body.tokens) > model.context_length:
            rule = f"the model's context has {model.context_length}"
            raise InvalidRequest("tokens", f"has {len(body.tokens)} token ids; {rule}")
        wrong = next((token for token in body.tokens if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest("tokens", f"has {wrong}; this model's token ids end at {model.vocab_size - 1}")
        return _told({"prompt": await asyncio.to_thread(text_of, self._gateway.tokenizer, body.tokens)})

    async def models(self) -> Response:
        return _told({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        self._gateway.check_model(name)
        return _told(self._model())

    async def health(self) -> Response:
        """Up: the process answers."""
        return _told({"status": "up"})

    async def ready(self) -> Response:
        """Ready: a worker is there, and the door is not closing."""
        if self._is_closing() or not servable(self._gateway.view):
            why = "this gateway is closing" if self._is_closing() else "there is no worker yet"
            return failed(Failure(503, why, "not_ready", retry_after_s=READY_AGAIN_S))
        return _told({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(await metrics_text(self._context, self._gateway), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        return _told({"version": _version()})

    def _model(self) -> dict[str, Any]:
        model = self._context.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "diptych",
            "max_model_len": self._gateway.max_model_len,
            "default_sampling_params": self._gateway.default_sampling,
        }

    async def failed(self, request: Request, error: Exception) -> Response:
        return failed(failure_of(error, servable(self._gateway.view), request.scope[KEY].unique))


async def _malformed(request: Request, error: Exception) -> Response:
    """The first of what is wrong with a body."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        failure = Failure(400, f"the body is not JSON: {first['ctx']['error']}", "invalid_request")
    elif not place:
        failure = Failure(400, "the body is no JSON object; send one as application/json", "invalid_request")
    else:
        failure = Failure(400, f"{place[0]}: {first['msg']} (at {'.'.join(place)[:80]})", "invalid_request", place[0])
    return failed(failure)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        400: "the body cannot be read as JSON",
        404: f"there is nothing at {request.url.path[:80]}",
        405: f"{request.method} is not possible here",
    }
    failure = Failure(error.status_code, words.get(error.status_code, str(error.detail)), "invalid_request")
    refusal = failed(failure)
    refusal.headers.update(error.headers or {})  # Allow
    return refusal


def _version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:
        return "not installed"


def _told(value: dict[str, Any]) -> Response:
    return Response(json.dumps(value), media_type=JSON)
