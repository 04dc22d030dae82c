"""The endpoint that receives a load: its interface, and how an address selects one. Knows no protocol."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cluster.offline.load.sender import Ended, LoadOptions
from cluster.offline.scoring.records import Run
from cluster.offline.workload.arrivals import Workload
from diptych.access import Access


class EndpointError(Exception):
    """An endpoint cannot be measured; the message says why and what to do."""


class Endpoint(Protocol):
    """`vocab_size`: token ids of prompts are below it. `description`: what it is and where."""

    name: str
    description: str
    vocab_size: int

    async def drive(self, workload: Workload, load: LoadOptions, ended: Ended) -> Run:
        """Send the workload and wait for the last answer."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """An address: `grpc://HOST:PORT` or `HOST:PORT` is a Diptych gateway, `http://HOST:PORT[/v1]` any OpenAI server;
    with TLS, `grpcs://` and `https://`.

    `model` is empty for the only one. `api_key` and `tokenizer` (a folder) are for HTTP. gRPC ignores `api_key`,
    because the environment may have it for another server. Raises `EndpointError` for options that do not fit the
    address.
    """

    address: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    tokenizer: Path | None = None
    access: Access = field(default_factory=Access)

    @property
    def bearer(self) -> str:
        """The key for HTTP: from --key-file, else --api-key, else DIPTYCH_API_KEY. Empty: none."""
        return self.access.api_key or self.api_key or self.access.key

    @property
    def is_http(self) -> bool:
        return self.address.startswith(("http://", "https://"))

    def __post_init__(self) -> None:
        scheme, found, _ = self.address.partition("://")
        if found and scheme not in ("grpc", "grpcs", "http", "https"):
            raise EndpointError(
                f"{self.address}: {scheme}:// is no endpoint; write grpc://HOST:PORT or http://HOST:PORT"
            )
        if not self.is_http and self.tokenizer:
            raise EndpointError(f"{self.address} is gRPC; --tokenizer goes with http:// endpoints")
        if self.access.has_files and scheme == "http":
            raise EndpointError(f"{self.address} is without TLS; write https://, or leave --ca and --cert out")
