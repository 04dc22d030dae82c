"""What `/openapi.json` says of answers: what each path gives, and the one form that all refusals have. Pure."""

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

METRICS = "/metrics"
ERROR = {"$ref": "#/components/schemas/Error"}
GENERATION = ("/v1/completions", "/v1/chat/completions")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    """As OpenAI's."""

    error: ErrorDetail


def described(path: str, method: str) -> dict[str, Any]:
    """What FastAPI wants to know of a route. With a default it invents no 422."""
    # A model would be described by the route's own kind of content, which here is not that of its errors.
    error = {"content": {"application/json": {"schema": ERROR}}} if path == METRICS else {"model": Error}
    told: dict[int | str, dict[str, Any]] = {"default": error | {"description": "Refused, or failed"}}
    if method == "POST":
        told[400] = error | {"description": "Bad input; param names the field"}
    if path in GENERATION:
        told[200] = {
            "description": "The whole answer, or with stream its chunks as server-sent events",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    kind: type[Response] = PlainTextResponse if path == METRICS else JSONResponse
    return {"methods": [method], "response_model": None, "response_class": kind, "responses": told}
