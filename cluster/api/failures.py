"""A failed call's gRPC status as the client's error: the other side of `statuses`."""

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cluster.api.errors import DiptychError
from cluster.api.messages import seconds


def error_from(status: status_pb2.Status) -> DiptychError:
    """The client's error for a status with details."""
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    error = DiptychError(names.get(status.code, "UNKNOWN"), status.message)
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            error.reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            error.field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            error.retry_after_s = seconds(retry.retry_delay)
    return error


def error_of_call(failure: grpc.aio.AioRpcError, endpoint: str) -> DiptychError:
    """The client's error for a failed call; one that never reached the server says so."""
    status = rpc_status.from_call(failure)
    if status is not None:
        return error_from(status)
    details = failure.details() or "no details"
    if failure.code() is grpc.StatusCode.UNAVAILABLE:
        cause = details.rpartition(": ")[2]  # grpc puts each layer's words before it
        details = f"nothing answers at {endpoint} ({cause}); is the cluster up, and is this its endpoint?"
    return DiptychError(failure.code().name, details)
