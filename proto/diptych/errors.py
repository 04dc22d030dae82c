"""The one error of the public client. Free of grpc, so that the command line can name it without loading grpc."""

NO_HANDSHAKE = "NO_HANDSHAKE"  # the reason where TLS cannot come about


class DiptychError(Exception):
    """A call failed. `code` is the gRPC status's name, such as "INVALID_ARGUMENT".

    `field` names the bad field, `retry_after_s` says when trying again makes sense, `reason` is a stable word for
    programs; each is None when the server did not say.
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
