"""Converts gRPC statuses to `DiptychError`; `cluster.frontend.grpc.statuses` makes them."""

import re

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from diptych.codec import seconds
from diptych.errors import NO_HANDSHAKE, DiptychError
from diptych.wire import MAX_REQUEST_BYTES

# grpc's messages of failed handshakes, and ours. Waiting fixes none of them.
HANDSHAKES = (
    ("CERTIFICATE_VERIFY_FAILED: ([^:]*)", "the certificate of {0} is not trusted ({1}); give the CA that signed it"),
    ("(Hostname Verification)", "the certificate of {0} is for another host; use a name that is in the certificate"),
    ("(WRONG_VERSION_NUMBER)", "{0} does not use TLS; write grpc://{0}"),
    ("(http1.x server)", "{0} speaks HTTP; give the port of gRPC, which `diptych serve` prints as grpc://HOST:PORT"),
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
    """The client's error for a failed call."""
    status = rpc_status.from_call(failure)
    if status is not None:
        return error_from(status)
    details = failure.details() or "no details"
    if failure.code() is grpc.StatusCode.CANCELLED:  # not by us, but by a server or a proxy that shuts down
        return DiptychError("UNAVAILABLE", f"{endpoint} dropped the call ({details}); it may be shutting down")
    if "larger than max" in details:
        rule = f"a request has at most {MAX_REQUEST_BYTES >> 20} MiB; send a shorter prompt, or a batch in parts"
        return DiptychError(failure.code().name, f"{details}: {rule}")
    if details == "Deadline Exceeded":  # gRPC's own words: no answer came
        message = f"{endpoint} did not answer in the time of this call; is it a gateway, and not overloaded?"
        return DiptychError("DEADLINE_EXCEEDED", message)
    if failure.code() is not grpc.StatusCode.UNAVAILABLE:
        return DiptychError(failure.code().name, details)
    for pattern, words in HANDSHAKES:
        if found := re.search(pattern, details):
            return DiptychError("UNAVAILABLE", words.format(endpoint, found[1]), reason=NO_HANDSHAKE)
    if CLOSED.search(details):
        why = f"it may require TLS (grpcs://{endpoint}) or a client certificate, or have too many connections"
        return DiptychError("UNAVAILABLE", f"{endpoint} closed the connection: {why}")
    cause = details.rpartition(": ")[2]  # after the messages of grpc's layers
    message = f"nothing answers at {endpoint} ({cause}); is the cluster running, and is this its endpoint?"
    return DiptychError("UNAVAILABLE", message)
