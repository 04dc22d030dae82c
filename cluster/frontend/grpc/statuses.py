"""Errors as gRPC statuses with google.rpc details: the only table of errors and codes.

Every status has ErrorInfo with a stable `reason` and the domain "diptych". Bad input also has BadRequest with its field
and a temporary error has RetryInfo.
"""

import logging
import secrets

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from cluster.control.changes import ChangeRefused, ControllerUnavailable, StaleRevision, UnknownMember
from cluster.events import AttemptsExhausted, DeadlineExceeded, NotComputable, Rejected, Unservable
from cluster.frontend.auth import KeyRefused, TenantRefused
from cluster.frontend.gateway import DuplicateRequest, GatewayClosed, RequestCancelled
from cluster.frontend.grpc.sender import OutputNotTaken
from cluster.frontend.models import UnknownModel
from diptych.codec import duration_of
from workers.errors import InvalidRequest
from workers.log_fields import log_fields

logger = logging.getLogger(__name__)

DOMAIN = "diptych"
NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
MAX_MESSAGE_CHARS = 1000  # statuses are sent in HTTP/2 trailers, which are limited to 8 KB
CONTROLLER_RETRY_S = 2.0  # a controller restarts in about this time
GATEWAY_RETRY_S = 1.0
ATTEMPTS_RETRY_S = 1.0  # a dead worker is replaced in about this time


def status_of(error: Exception, ready: bool, request_id: str = "") -> status_pb2.Status:
    """The status for an error of the gateway. `ready`: whether a worker is ready.

    Unexpected errors become INTERNAL with an id; the log has the traceback with that id and the request's.
    """
    code = grpc.StatusCode
    match error:
        case InvalidRequest():
            return _status(code.INVALID_ARGUMENT, "INVALID_REQUEST", error, field=(error.field, error.message))
        case Unservable():
            return _status(code.INVALID_ARGUMENT, "TOO_LONG", error, field=(error.field, error.message))
        case Rejected() if ready:
            return _status(code.RESOURCE_EXHAUSTED, "NO_ROOM", error, retry_s=error.retry_after_s)
        case Rejected():
            return _status(code.UNAVAILABLE, "NO_WORKERS", error, retry_s=error.retry_after_s)
        case DeadlineExceeded():
            return _status(code.DEADLINE_EXCEEDED, "DEADLINE", error, phase=error.phase)
        case OutputNotTaken():
            return _status(code.DEADLINE_EXCEEDED, "OUTPUT_NOT_TAKEN", error)
        case AttemptsExhausted():
            return _status(code.UNAVAILABLE, "ATTEMPTS_SPENT", error, retry_s=ATTEMPTS_RETRY_S)
        case NotComputable():
            logger.error("%s", error, extra=log_fields(key=request_id))
            return _status(code.INTERNAL, "NOT_COMPUTABLE", error)
        case UnknownModel():
            return _status(code.NOT_FOUND, "UNKNOWN_MODEL", error)
        case DuplicateRequest():
            return _status(code.ALREADY_EXISTS, "DUPLICATE_REQUEST", error)
        case RequestCancelled():
            return _status(code.CANCELLED, "CANCELLED", error)
        case GatewayClosed():
            return _status(code.UNAVAILABLE, "GATEWAY_CLOSED", error, retry_s=GATEWAY_RETRY_S)
        case KeyRefused():
            return _status(code.UNAUTHENTICATED, "INVALID_API_KEY", error)
        case TenantRefused():
            return _status(code.PERMISSION_DENIED, "TENANT_REFUSED", error)
        case StaleRevision():
            return _status(code.ABORTED, "STALE_REVISION", error)
        case UnknownMember():
            return _status(code.NOT_FOUND, "UNKNOWN_MEMBER", error)
        case ChangeRefused():
            return _status(code.FAILED_PRECONDITION, "CHANGE_REFUSED", error)
        case ControllerUnavailable():
            return _status(code.UNAVAILABLE, "NO_CONTROLLER", error, retry_s=CONTROLLER_RETRY_S)
    error_id = secrets.token_hex(4)
    logger.error("internal error %s", error_id, exc_info=error, extra=log_fields(key=request_id))
    return _status(code.INTERNAL, "INTERNAL", f"an unexpected error; search the server's log for {error_id}")


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
