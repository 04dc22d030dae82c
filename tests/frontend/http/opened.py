"""Both servers over one gateway on free ports of the loopback, and clients for each."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from cluster.frontend.servers import Servers
from cluster.frontend.text import Tokenizer
from diptych.client import AsyncClient
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.tokenizers import ByteTokenizer


@dataclass(frozen=True)
class Clients:
    """Of one gateway: the real SDK, plain HTTP, and gRPC."""

    openai: AsyncOpenAI
    http: httpx2.AsyncClient
    grpc: AsyncClient


@asynccontextmanager
async def clients(url: str, endpoint: str) -> AsyncIterator[Clients]:
    sdk_http = DefaultAsyncHttpxClient(trust_env=False, verify=False)  # no proxy; no certificates to load
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0, http_client=sdk_http) as sdk,
        httpx2.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=30.0) as http,
        AsyncClient(endpoint) as grpc,
    ):
        yield Clients(sdk, http, grpc)


@asynccontextmanager
async def opened(
    dispatcher: FakeDispatcher, load_tokenizer: Callable[[], Tokenizer] = ByteTokenizer, **gateway: Any
) -> AsyncIterator[tuple[Clients, Servers]]:
    """Doors over a fake dispatcher."""
    servers = Servers(gateway_context(dispatcher, http_port=0, **gateway), load_tokenizer)
    endpoint = await servers.open()
    try:
        async with clients(servers.http_url, endpoint) as there:
            yield there, servers
    finally:
        await servers.close(0.0)
