"""Every answer has the id of its request in its headers, also those that no route has seen."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.frontend.http import connection
from cluster.frontend.servers import Servers
from diptych.access import Access
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.guarded import Files, guarded
from tests.frontend.http.opened import Clients, opened

ASK = {"prompt": "hello", "max_tokens": 4}
NAMED = {"x-request-id": "mine"}


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
async def served(dispatcher: FakeDispatcher) -> AsyncIterator[tuple[Clients, Servers]]:
    async with opened(dispatcher) as both:
        yield both


@pytest.fixture
def there(served: tuple[Clients, Servers]) -> Clients:
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
async def test_the_request_id_is_echoed_or_generated(
    there: Clients, method: str, path: str, body: object, status: int
) -> None:
    named = await there.http.request(method, path, json=body, headers=NAMED)
    assert (named.status_code, named.headers.get_list("x-request-id")) == (status, ["mine"])
    made = [(await there.http.request(method, path, json=body)).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1] and all(each.startswith("req-") for each in made)


async def test_an_unexpected_error_has_the_request_id(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.error = RuntimeError("nobody foresaw this")
    answer = await there.http.post("/v1/completions", json=ASK, headers=NAMED)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")


async def test_the_error_of_a_body_that_is_too_large_has_the_request_id(
    there: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", 10)
    answer = await there.http.post("/v1/completions", json=ASK, headers=NAMED)
    assert (answer.status_code, answer.headers["x-request-id"]) == (413, "mine")


async def test_the_error_of_a_missing_body_has_the_request_id(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.05)
    url = there.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /tokenize HTTP/1.1\r\nhost: here\r\nx-request-id: mine\r\ncontent-length: 10\r\n\r\n{")
    async with asyncio.timeout(30.0):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert b" 408 " in head and b"\r\nx-request-id: mine\r\n" in head


@pytest.mark.parametrize(("name", "value", "status"), [("_running", 1 << 20, 429), ("_is_closing", lambda: True, 503)])
async def test_the_error_of_a_full_or_closing_server_has_the_request_id(
    served: tuple[Clients, Servers], monkeypatch: pytest.MonkeyPatch, name: str, value: object, status: int
) -> None:
    there, servers = served
    assert servers._http is not None
    monkeypatch.setattr(servers._http._requests, name, value)
    answer = await there.http.post("/v1/completions", json=ASK, headers=NAMED)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")


async def test_several_requests_may_share_an_id(there: Clients, dispatcher: FakeDispatcher) -> None:
    """A service mesh gives all requests of one trace one id."""
    dispatcher.hold = asyncio.Event()
    asking = [asyncio.create_task(there.http.post("/v1/completions", json=ASK, headers=NAMED)) for _ in range(3)]
    async with asyncio.timeout(30.0):
        while len(dispatcher.running) < 3:
            await asyncio.sleep(0.005)
    dispatcher.hold.set()
    answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
    ids = {request.id for request in dispatcher.requests}
    assert len(ids) == 3 and all(each.startswith("mine-") for each in ids), "grep for the one finds the others"
    assert {answer.json()["id"] for answer in answers} == {f"cmpl-{each}" for each in ids}


@pytest.mark.parametrize("given", [b"trace/7", b"a#b", b"two words", b"x" * 5000, b"gr\xfc\xdfe", b"'"])
@pytest.mark.parametrize("prompt", ["hello", ["hello"] * 11])
async def test_any_id_in_a_header_is_accepted(
    there: Clients, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture, given: bytes, prompt: object
) -> None:
    caplog.set_level("INFO", "cluster.frontend.http")
    body = ASK | {"prompt": prompt, "n": 2}
    answer = await there.http.post("/v1/completions", json=body, headers={b"x-request-id": given})
    assert answer.status_code == 200, answer.text
    assert (b"x-request-id", given) in answer.headers.raw
    unique = answer.json()["id"].removeprefix("cmpl-")
    assert all(request.id.startswith(unique) for request in dispatcher.requests)
    kept = unique.startswith(given.decode("latin-1"))
    assert kept or (unique in caplog.text and given[:400].decode("latin-1") in caplog.text), "a line tells both"


@pytest.mark.parametrize("prompt", ["hello", ["hello", "there"]])
async def test_a_request_is_cancelled_by_its_client_id_or_its_own_id(
    there: Clients, dispatcher: FakeDispatcher, prompt: object
) -> None:
    dispatcher.hold = asyncio.Event()
    for by_own in (False, True):
        body = ASK | {"prompt": prompt}
        asking = asyncio.create_task(there.http.post("/v1/completions", json=body, headers=NAMED))
        async with asyncio.timeout(30.0):
            while not dispatcher.running:
                await asyncio.sleep(0.005)
        (own, *_) = dispatcher.running
        assert not await there.grpc.cancel("") and not await there.grpc.cancel("another")
        assert await there.grpc.cancel(own if by_own else "mine")
        assert (await asking).status_code == 499 and not dispatcher.running


async def test_the_error_of_a_missing_key_has_the_request_id(tmp_path: Path) -> None:
    files = Files.made(tmp_path)
    async with guarded(FakeDispatcher(), **files.keys) as server, server.http(Access()) as client:
        answer = await client.get("/v1/models", headers=NAMED)
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")
