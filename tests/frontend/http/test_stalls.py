"""No input of one client delays another's token: what is large is read and tokenized in another process."""

import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from cluster.frontend.preprocessing import LARGE_BYTES
from diptych.wire import INFERENCE
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.hostile import MAX_S, bodies, longest_callback, messages
from tests.frontend.http.opened import Clients, opened
from tests.frontend.tokenizers import Homebound

HOME = os.getpid()
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def there() -> AsyncIterator[Clients]:
    async with opened(FakeDispatcher(), Homebound) as (clients, _):
        yield clients


@pytest.mark.grid(keep=3)
@pytest.mark.parametrize(("path", "body"), [pytest.param(path, body, id=name) for name, path, body in bodies()])
async def test_no_body_blocks_the_event_loop(there: Clients, path: str, body: bytes) -> None:
    Homebound.largest = 0
    with longest_callback() as longest:
        answer = await there.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 413), answer.text[:300]
    assert longest.seconds < MAX_S, longest
    assert Homebound.largest <= LARGE_BYTES


@pytest.mark.grid(keep=2)
@pytest.mark.parametrize("name", messages(size=8))
async def test_no_message_blocks_the_event_loop(there: Clients, name: str) -> None:
    method, message = messages()[name]
    Homebound.largest = 0
    async with grpc.aio.insecure_channel(there.grpc.endpoint) as channel:
        call: Any = channel.unary_stream(f"/{INFERENCE}/{method}")
        with longest_callback() as longest:
            end = await _end(call(message))
    assert end in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
    assert longest.seconds < MAX_S, longest
    assert Homebound.largest <= LARGE_BYTES


async def _end(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
