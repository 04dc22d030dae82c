"""The error of the public client. Does not import grpc, so that the command line starts fast."""

NO_HANDSHAKE = "NO_HANDSHAKE"  # the reason of a failed TLS handshake


class DiptychError(Exception):
    """A call failed. `code` is the gRPC status's name, such as "INVALID_ARGUMENT".

    `field`: the invalid field. `retry_after_s`: when a retry makes sense. `reason`: a stable identifier for programs.
    Each is None if the server did not send it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"
