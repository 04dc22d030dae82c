"""Errors in OpenAI's and Anthropic's formats, with an HTTP status; `cluster.frontend.grpc.statuses` has the codes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from cluster.events import Unservable
from cluster.frontend.grpc.statuses import status_of
from diptych.failures import error_from
from workers.errors import InvalidRequest

JSON = "application/json"
STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
TYPES = {429: "rate_limit_error", 499: "cancelled_error", 504: "timeout_error"}
CODES = {"UNKNOWN_MODEL": "model_not_found", "TOO_LONG": "context_length_exceeded"}
# Prefixes of the gateway's field names, and HTTP's names for them; the first match counts.
FIELDS = (
    *(("sampling.include_stop_in_output", "include_stop_str_in_output"), ("sampling.", "")),
    *(("prompt.chat.tools", "tools"), ("prompt.chat.messages", "messages"), ("prompt.chat", "messages")),
    *(("prompt.text", "prompt"), ("prompt.tokens", "prompt")),
    ("tenant", "x-diptych-tenant"),
)
# Of Anthropic's API; others are invalid_request_error and api_error.
MESSAGES = "/v1/messages"
MESSAGES_TYPES = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
    **{429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Failure:
    """The error for a client. `retry_after_s`: when a retry makes sense."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def messages_body(self) -> bytes:
        """In the format of Anthropic's API, which does not name the field."""
        kind = MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        where = f"{self.param}: " if self.param else ""
        error: dict[str, Any] = {"type": kind, "message": where + self.message.removeprefix(where)}
        if self.param == "thread":  # the SDK's tool runner then sends the whole conversation with each turn
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return json.dumps({"type": "error", "error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        wait_ms = math.ceil(self.retry_after_s * 1000)
        return {"retry-after": str(max(1, math.ceil(wait_ms / 1000))), "retry-after-ms": str(max(1, wait_ms))}

    def response(self, path: str = "", **headers: str) -> Response:
        """`path`: of the request, whose API has a format of its own for errors."""
        body = self.messages_body if path.startswith(MESSAGES) else self.body
        return Response(body, self.status, self.headers | headers, JSON)


def failure_of(error: Exception, ready: bool, request_id: str = "", names: Mapping[str, str] = NOTHING) -> Failure:
    """The failure for an error of the gateway. `ready`, `request_id`: see `status_of`. `names`: `Body.client_names`."""
    match error:
        case InvalidRequest():
            error = InvalidRequest(_sendable(_param(error.field, names)), _sendable(error.message))
        case Unservable():
            error = Unservable(error.message, _param(error.field, names))
    known = error_from(status_of(error, ready, request_id))
    reason = known.reason or known.code
    status, code = STATUSES.get(known.code, 500), CODES.get(reason, reason.lower())
    return Failure(status, known.message, code, known.field, known.retry_after_s)


def _param(field: str, names: Mapping[str, str]) -> str:
    if field in names:
        return names[field]
    for ours, theirs in FIELDS:
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


def _sendable(text: str) -> str:
    """A client's text may have half a surrogate pair."""
    return text.encode(errors="replace").decode()
