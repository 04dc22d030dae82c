"""The responses of each route for `/openapi.json`. Pure."""

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from cluster.frontend.http.failures import MESSAGES

METRICS = "/metrics"
ERROR = {"$ref": "#/components/schemas/Error"}
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """Anthropic's error object."""

    type: str
    error: MessagesErrorDetail


def _error(path: str) -> type[BaseModel]:
    return MessagesError if path.startswith(MESSAGES) else Error


def route_options(path: str, method: str) -> dict[str, Any]:
    """FastAPI's options for a route. The default response keeps FastAPI from adding a 422."""
    # With a model, FastAPI would document errors of /metrics with the content type of its text.
    error = {"content": {"application/json": {"schema": ERROR}}} if path == METRICS else {"model": _error(path)}
    responses: dict[int | str, dict[str, Any]] = {"default": error | {"description": "Refused, or failed"}}
    if method == "POST":
        responses[400] = error | {"description": "Bad input; param names the field"}
    if path in GENERATION:
        responses[200] = {
            "description": "The whole answer, or with stream its chunks as server-sent events",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    kind: type[Response] = PlainTextResponse if path == METRICS else JSONResponse
    return {"methods": [method], "response_model": None, "response_class": kind, "responses": responses}
