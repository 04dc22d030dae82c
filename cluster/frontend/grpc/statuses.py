"""Errors as gRPC statuses with google.rpc details: the only table of errors and codes.

Every status has ErrorInfo with a stable `reason` and the domain "diptych". Bad input also has BadRequest with its field
and a temporary error has RetryInfo.
"""

import logging
import secrets
from collections.abc import Mapping

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from cluster.control.changes import ChangeRefused, ControllerUnavailable, StaleRevision, UnknownMember
from cluster.events import AttemptsExhausted, DeadlineExceeded, NotComputable, Rejected, Unservable
from cluster.frontend.auth import KeyRefused, TenantRefused
from cluster.frontend.context import UnknownModel
from cluster.frontend.gateway import DuplicateRequest, GatewayClosed, RequestCancelled
from cluster.frontend.grpc.sender import OutputNotTaken
from diptych.codec import duration_of
from workers.errors import InvalidRequest
from workers.log_fields import log_fields

logger = logging.getLogger(__name__)

DOMAIN = "diptych"
NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
MAX_MESSAGE_CHARS = 1000  # statuses are sent in HTTP/2 trailers, which are limited to 8 KB

CODE = grpc.StatusCode
# Errors that have nothing but their text: code, reason, and seconds until a retry may succeed.
PLAIN: Mapping[type[Exception], tuple[grpc.StatusCode, str, float | None]] = {
    OutputNotTaken: (CODE.DEADLINE_EXCEEDED, "OUTPUT_NOT_TAKEN", None),
    grpc.aio.InternalError: (CODE.CANCELLED, "CANCELLED", None),  # a message could not be sent: the client has left
    AttemptsExhausted: (CODE.UNAVAILABLE, "ATTEMPTS_SPENT", 1.0),  # a dead worker is replaced in about this time
    UnknownModel: (CODE.NOT_FOUND, "UNKNOWN_MODEL", None),
    DuplicateRequest: (CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST", None),
    RequestCancelled: (CODE.CANCELLED, "CANCELLED", None),
    GatewayClosed: (CODE.UNAVAILABLE, "GATEWAY_CLOSED", 1.0),
    KeyRefused: (CODE.UNAUTHENTICATED, "INVALID_API_KEY", None),
    TenantRefused: (CODE.PERMISSION_DENIED, "TENANT_REFUSED", None),
    StaleRevision: (CODE.ABORTED, "STALE_REVISION", None),
    UnknownMember: (CODE.NOT_FOUND, "UNKNOWN_MEMBER", None),
    ChangeRefused: (CODE.FAILED_PRECONDITION, "CHANGE_REFUSED", None),
    ControllerUnavailable: (CODE.UNAVAILABLE, "NO_CONTROLLER", 2.0),  # it restarts in about this time
}


def status_of(error: Exception, ready: bool, request_id: str = "") -> status_pb2.Status:
    """The status for an error of the gateway. `ready`: whether a worker is ready.

    Unexpected errors become INTERNAL with an id; the log has the traceback with that id and the request's.
    """
    match error:
        case InvalidRequest():
            return _status(CODE.INVALID_ARGUMENT, "INVALID_REQUEST", error, field=(error.field, error.message))
        case Unservable():
            return _status(CODE.INVALID_ARGUMENT, "TOO_LONG", error, field=(error.field, error.message))
        case Rejected() if ready:
            return _status(CODE.RESOURCE_EXHAUSTED, "NO_ROOM", error, retry_s=error.retry_after_s)
        case Rejected():
            return _status(CODE.UNAVAILABLE, "NO_WORKERS", error, retry_s=error.retry_after_s)
        case DeadlineExceeded():
            return _status(CODE.DEADLINE_EXCEEDED, "DEADLINE", error, phase=error.phase)
        case NotComputable():
            logger.error("%s", error, extra=log_fields(key=request_id))
            return _status(CODE.INTERNAL, "NOT_COMPUTABLE", error)
    for kind, (number, reason, retry_s) in PLAIN.items():
        if isinstance(error, kind):
            return _status(number, reason, error, retry_s=retry_s)
    error_id = secrets.token_hex(4)
    logger.error("internal error %s", error_id, exc_info=error, extra=log_fields(key=request_id))
    return _status(CODE.INTERNAL, "INTERNAL", f"an unexpected error; search the server's log for {error_id}")


def code_name(code: int) -> str:
    """The name of a status number."""
    return NAMES.get(code, grpc.StatusCode.UNKNOWN.name)


def _status(
    code: grpc.StatusCode,
    reason: str,
    error: Exception | str,
    *,
    field: tuple[str, str] | None = None,
    retry_s: float | None = None,
    phase: str | None = None,
) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    if phase is not None:
        info.metadata["phase"] = phase
    details: list[Message] = [info]
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field[0], description=_short(field[1]))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_of(retry_s)))
    packed = []
    for detail in details:
        packed.append(Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code.value[0], message=_short(str(error)), details=packed)


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 2] + " …"
