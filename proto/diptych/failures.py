"""A failed call's gRPC status as a `DiptychError`; `cluster.frontend.grpc.statuses` makes the statuses."""

import re

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from diptych.codec import seconds
from diptych.errors import NO_HANDSHAKE, DiptychError
from diptych.wire import MAX_REQUEST_BYTES

# What grpc reports for a failed handshake, and what the caller should do. Waiting fixes none of them.
HANDSHAKES = (
    ("CERTIFICATE_VERIFY_FAILED: ([^:]*)", "the certificate of {0} is not trusted ({1}); give the CA that signed it"),
    ("(Hostname Verification)", "the certificate of {0} is for another host; ask by a name that stands in it"),
    ("(WRONG_VERSION_NUMBER)", "{0} speaks no TLS; write grpc://{0}"),
)
CLOSED = re.compile("all addresses.*Socket closed")


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
    if failure.code() is grpc.StatusCode.CANCELLED:  # not by us: a server or a proxy that ends drops its calls
        return DiptychError("UNAVAILABLE", f"{endpoint} dropped the call ({details}); it may be ending")
    if "larger than max" in details:
        rule = f"a request has at most {MAX_REQUEST_BYTES >> 20} MiB; send a shorter prompt, or a batch in parts"
        return DiptychError(failure.code().name, f"{details}: {rule}")
    if failure.code() is not grpc.StatusCode.UNAVAILABLE:
        return DiptychError(failure.code().name, details)
    for pattern, words in HANDSHAKES:
        if found := re.search(pattern, details):
            return DiptychError("UNAVAILABLE", words.format(endpoint, found[1]), reason=NO_HANDSHAKE)
    if CLOSED.search(details):
        told = f"{endpoint} closed the connection: it may want TLS (grpcs://{endpoint}), or a certificate"
        return DiptychError("UNAVAILABLE", told)
    cause = details.rpartition(": ")[2]  # grpc puts each layer's words before it
    told = f"nothing answers at {endpoint} ({cause}); is the cluster up, and is this its endpoint?"
    return DiptychError("UNAVAILABLE", told)
