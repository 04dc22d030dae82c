"""A client's credentials, and the CAs it trusts. Does not import grpc, so that the command line starts fast."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.errors import DiptychError

if TYPE_CHECKING:
    import ssl

KEY_VARIABLE = "DIPTYCH_API_KEY"


@dataclass(frozen=True, slots=True)
class Access:
    """`ca_file`: CAs to verify the gateway's certificate with; None: the system's.

    `cert_file` and `key_file`: the client's own certificate and its key. `api_key` None: the environment's
    DIPTYCH_API_KEY, if it is set; empty: no key.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            missing = "key_file" if self.key_file is None else "cert_file"
            raise _wrong(missing, "a client's certificate and its key come together; give both")
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise _wrong("api_key", "an API key has visible ASCII characters only")

    @property
    def key(self) -> str:
        """The API key; empty: none."""
        return os.environ.get(KEY_VARIABLE, "") if self.api_key is None else self.api_key

    @property
    def has_files(self) -> bool:
        return self.ca_file is not None or self.cert_file is not None

    def context(self) -> "ssl.SSLContext":
        """The TLS context for an HTTP client. Raises OSError."""
        import ssl  # slow to import, and few commands need it

        context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        if self.cert_file is not None and self.key_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


def _wrong(field: str, message: str) -> DiptychError:
    return DiptychError("INVALID_ARGUMENT", message, field=field)
