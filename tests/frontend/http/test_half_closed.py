"""A client that has closed its sending side gets its answer; one that has left is noticed, and its request ends."""

import asyncio
import json
from typing import Any

import pytest

from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, opened
from tests.frontend.http.test_connection_bounds import ASK, head, raw, rest, until


def asking(version: str = "1.1", **more: object) -> bytes:
    body = json.dumps(ASK | more).encode()
    return head(len(body)).replace(b"HTTP/1.1", f"HTTP/{version}".encode()) + body


@pytest.mark.parametrize("wants", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_a_client_that_closed_its_sending_side_gets_its_answer(
    dispatcher: FakeDispatcher, wants: dict[str, Any]
) -> None:
    dispatcher.step_s = 0.1
    async with opened(dispatcher) as (_, servers), raw(servers.http_url, asking(**wants)) as (reader, writer):
        await until(lambda: bool(dispatcher.running))
        writer.write_eof()
        got = await rest(reader)
    assert (b"\r\n:\n\n\r\n" if wants else b"HTTP/1.1 102 ") in got, "what tells it from a client that has left"
    assert (b"data: [DONE]" if wants else b'"completion_tokens":4') in got


async def test_all_requests_before_a_half_close_are_answered(there: Clients) -> None:
    sent = asking() + asking() + asking()[:-1]
    async with raw(str(there.http.base_url).rstrip("/"), sent) as (reader, writer):
        writer.write_eof()
        assert (await rest(reader)).count(b"HTTP/1.1 200") == 2, "the third never arrived whole"


@pytest.mark.parametrize("wants", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_a_client_that_left_is_noticed_before_the_response_starts(
    dispatcher: FakeDispatcher, wants: dict[str, Any]
) -> None:
    dispatcher.hold = asyncio.Event()
    async with opened(dispatcher) as (_, servers):
        async with raw(servers.http_url, asking(**wants)):
            await until(lambda: bool(dispatcher.running))
        await until(lambda: not dispatcher.running)


async def test_an_http_1_0_client_that_half_closed_has_left(dispatcher: FakeDispatcher) -> None:
    """It takes no interim responses."""
    dispatcher.hold = asyncio.Event()
    async with opened(dispatcher) as (_, servers), raw(servers.http_url, asking("1.0")) as (reader, writer):
        await until(lambda: bool(dispatcher.running))
        writer.write_eof()
        assert await rest(reader) == b""
        await until(lambda: not dispatcher.running)
