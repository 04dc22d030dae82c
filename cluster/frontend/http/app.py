"""The HTTP application: paths, statuses, and the choice of the model whose routes (`model_routes`) handle a body."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from email.message import Message
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cluster.events import ClusterError
from cluster.frontend.gateway import servable
from cluster.frontend.grpc.services import metrics_text
from cluster.frontend.http.bodies import Body, MalformedBody
from cluster.frontend.http.failures import JSON, Failure, failure_of
from cluster.frontend.http.middleware import NAME, ROUTES
from cluster.frontend.http.model_routes import ModelRoutes
from cluster.frontend.http.openapi import route_options
from cluster.frontend.http.preprocess import read_model
from cluster.frontend.http.responses_body import ResponseStore
from cluster.frontend.http.ui.routes import add_ui
from cluster.frontend.preprocessing import LARGE_BYTES
from cluster.frontend.served_models import ServedModels
from workers.errors import InvalidRequest

READY_RETRY_S = 1.0
LARGE = {"/tokenize": 1024, "/detokenize": 512}  # bytes that take as long as `LARGE_BYTES` of a prompt: 5 ms


def make_app(models: ServedModels, is_closing: Callable[[], bool]) -> FastAPI:
    """The application of one gateway."""
    quiet = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False}
    app = FastAPI(title="Diptych", redoc_url=None, telemetry=quiet)  # type: ignore[arg-type]
    app.state.routes = routes = _Routes(models, is_closing)
    for path, name in ROUTES.items():
        handler = routes.by_model(name)
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
    add_ui(app, models)
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
    """Owned by the application. `is_closing`: whether the server is."""

    def __init__(self, models: ServedModels, is_closing: Callable[[], bool]) -> None:
        responses, encoding = ResponseStore(), asyncio.Semaphore(1)
        self._models = models
        self._is_closing = is_closing
        self._by_gateway = {
            gateway: ModelRoutes(context, gateway, responses, encoding)
            for context, gateway in zip(models.context.models, models.gateways, strict=True)
        }

    def of(self, model: str) -> ModelRoutes:
        """Those of a request's `model`. Raises `UnknownModel`."""
        return self._by_gateway[self._models.of(model)]

    def by_model(self, name: str) -> Callable[..., Coroutine[Any, Any, Response]]:
        """The handler of this name, of the model that the body names."""

        @wraps(getattr(next(iter(self._by_gateway.values())), name))  # FastAPI reads its signature
        async def handle(body: Body, **more: Any) -> Response:
            response: Response = await getattr(self.of(body.model or ""), name)(body, **more)
            return response

        return handle

    async def large(self, request: Request, raw: bytes) -> Response | None:
        """As `ModelRoutes.large`."""
        model = ""
        if self._models.has_several:
            model = await self._models.gateways[0].preprocessing.call(len(raw), read_model, raw)
        return await self.of(model).large(request, raw)

    async def models(self) -> Response:
        models = [model for each in self._by_gateway.values() for model in await each.describe_all()]
        return _json({"object": "list", "data": models})

    async def model(self, name: str) -> Response:
        return _json(await self.of(name).describe(name))

    async def health(self) -> Response:
        """Liveness: the process responds."""
        return _json({"status": "up"})

    async def ready(self) -> Response:
        """Readiness: a worker is ready, and the server is not closing."""
        if self._is_closing() or not servable(self._models.view):
            why = "this gateway is closing" if self._is_closing() else "no worker is ready"
            return Failure(503, why, "not_ready", retry_after_s=READY_RETRY_S).response()
        return _json({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(await metrics_text(self._models), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        return _json({"version": _version()})

    async def tokenizer_info(self, model: str = "") -> Response:
        return _json(dict(self._models.of(model).tokenizer.info))

    async def failed(self, request: Request, error: Exception) -> Response:
        return failure_of(error, servable(self._models.view), request.scope[NAME].unique).response(
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
