"""Every answer has the id of its request in its headers, also those that no route has seen."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.api.access import Access
from cluster.doors import Doors
from cluster.http import connection
from tests.api.fake import FakeDispatcher
from tests.http.guarded import Files, guarded
from tests.http.opened import Clients, opened

ASK = {"prompt": "hello", "max_tokens": 4}
NAMED = {"x-request-id": "mine"}


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
async def served(dispatcher: FakeDispatcher) -> AsyncIterator[tuple[Clients, Doors]]:
    async with opened(dispatcher) as both:
        yield both


@pytest.fixture
def there(served: tuple[Clients, Doors]) -> Clients:
    return served[0]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", ASK, 200),
        ("POST", "/v1/completions", ASK | {"stream": True}, 200),
        ("POST", "/v1/completions", ASK | {"temperature": "warm"}, 400),
        ("POST", "/v1/completions", ASK | {"temperature": -1}, 400),
        ("POST", "/v1/completions", ASK | {"model": "another"}, 404),
        ("POST", "/tokenize", {"prompt": "hello"}, 200),
        ("POST", "/tokenize", {}, 400),
        ("POST", "/detokenize", {"tokens": [1]}, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/another", None, 404),
        ("GET", "/health", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
    ],
)
async def test_it_is_told_as_it_was_given_or_made(
    there: Clients, method: str, path: str, body: object, status: int
) -> None:
    named = await there.http.request(method, path, json=body, headers=NAMED)
    assert (named.status_code, named.headers.get_list("x-request-id")) == (status, ["mine"])
    made = [(await there.http.request(method, path, json=body)).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1] and all(each.startswith("req-") for each in made)


async def test_an_error_that_nobody_foresaw_has_it(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.error = RuntimeError("nobody foresaw this")
    answer = await there.http.post("/v1/completions", json=ASK, headers=NAMED)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")


async def test_a_body_that_is_too_large_has_it(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_BYTES", 10)
    answer = await there.http.post("/v1/completions", json=ASK, headers=NAMED)
    assert (answer.status_code, answer.headers["x-request-id"]) == (413, "mine")


async def test_a_body_that_does_not_come_has_it(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.05)
    url = there.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /tokenize HTTP/1.1\r\nhost: here\r\nx-request-id: mine\r\ncontent-length: 10\r\n\r\n{")
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert b" 408 " in head and b"\r\nx-request-id: mine\r\n" in head


@pytest.mark.parametrize(("name", "value", "status"), [("_running", 1 << 20, 429), ("_is_closing", lambda: True, 503)])
async def test_a_door_that_is_full_or_closing_has_it(
    served: tuple[Clients, Doors], monkeypatch: pytest.MonkeyPatch, name: str, value: object, status: int
) -> None:
    there, doors = served
    assert doors._http is not None
    monkeypatch.setattr(doors._http._requests, name, value)
    answer = await there.http.post("/v1/completions", json=ASK, headers=NAMED)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")


async def test_a_door_that_wants_a_key_has_it(tmp_path: Path) -> None:
    files = Files.made(tmp_path)
    async with guarded(FakeDispatcher(), **files.keys) as door, door.http(Access()) as client:
        answer = await client.get("/v1/models", headers=NAMED)
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")
