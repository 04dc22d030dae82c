import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import uvicorn.server

from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, opened
from tests.frontend.tokenizers import ByteTokenizer


class OftenAwake:
    """asyncio for uvicorn, which looks ten times a second whether it should exit, and waits as long again."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 20)


@pytest.fixture(autouse=True)
def servers_close_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.server, "asyncio", OftenAwake())


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
async def there(dispatcher: FakeDispatcher) -> AsyncIterator[Clients]:
    async with opened(dispatcher) as (clients, _):
        yield clients


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[tuple[FakeDispatcher, Clients]]:
    """One server for all tests of a file, with its TOKENIZER: its processes start once. `renewed` for each test."""
    dispatcher = FakeDispatcher()
    async with opened(dispatcher, getattr(request.module, "TOKENIZER", ByteTokenizer)) as (clients, _):
        yield dispatcher, clients
