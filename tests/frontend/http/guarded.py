"""Guarded servers over a fake dispatcher, and what a client needs for them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from cluster.frontend.auth import Authenticator
from cluster.frontend.servers import Servers
from diptych.access import Access
from diptych.client import AsyncClient
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.http.certificates import Authority
from tests.frontend.tokenizers import ByteTokenizer

KEY = "a-key-that-is-long-enough"


@dataclass(frozen=True)
class Guarded:
    """Open servers, and the clock by which their guard looks at its files."""

    servers: Servers
    endpoint: str
    clock: "Clock"

    @property
    def url(self) -> str:
        return self.servers.http_url

    def grpc(self, access: Access) -> AsyncClient:
        return AsyncClient(f"grpcs://{self.endpoint}", access=access)

    @asynccontextmanager
    async def http(self, access: Access) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"Authorization": f"Bearer {access.key}"} if access.key else {}
        async with httpx2.AsyncClient(
            base_url=self.url, verify=access.context(), headers=headers, trust_env=False, timeout=20.0
        ) as client:
            yield client

    @asynccontextmanager
    async def openai(self, access: Access) -> AsyncIterator[AsyncOpenAI]:
        through = DefaultAsyncHttpxClient(verify=access.context(), trust_env=False)
        made = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=access.key, max_retries=0, http_client=through)
        async with made as client:
            yield client


class Clock:
    """Stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Files:
    """Two authorities, a server's certificate, and a file with a key."""

    folder: Path
    servers: Authority
    clients: Authority

    @classmethod
    def made(cls, folder: Path) -> "Files":
        files = cls(folder, Authority(folder, "servers"), Authority(folder, "clients"))
        files.servers.sign("server")
        files.write_keys(KEY)
        return files

    def write_keys(self, *keys: str) -> None:
        (self.folder / "keys").write_text("".join(f"# whose it is\n{key}\n\n" for key in keys))

    @property
    def tls(self) -> dict[str, Any]:
        return {"tls_cert_file": f"{self.folder}/server.pem", "tls_key_file": f"{self.folder}/server-key.pem"}

    @property
    def mutual(self) -> dict[str, Any]:
        return self.tls | {"tls_client_ca_file": str(self.clients.ca)}

    @property
    def keys(self) -> dict[str, Any]:
        return {"api_keys_file": f"{self.folder}/keys"}


@asynccontextmanager
async def guarded(dispatcher: FakeDispatcher, **gateway: Any) -> AsyncIterator[Guarded]:
    context = gateway_context(dispatcher, http_port=0, **gateway)
    clock = Clock()
    servers = Servers(context, ByteTokenizer)
    servers._grpc.guard = Authenticator(context.spec.gateway, clock)
    endpoint = await servers.open()
    try:
        yield Guarded(servers, endpoint, clock)
    finally:
        await servers.close(0.0)
