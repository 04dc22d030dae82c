"""Every refusal is OpenAI's error object with the right status, and says which field and when to try again."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
from openai import APIError, RateLimitError

from cluster.events import AttemptsSpent, DeadlinePassed, Rejected, Unservable
from cluster.http import connection
from cluster.view import WorkerState
from tests.api.fake import FakeDispatcher, view
from tests.http.opened import Clients, opened

ASK = {"prompt": "hello", "max_tokens": 4}
HUGE = json.dumps({"prompt": ["hi"] * 4, "max_tokens": 3000, "stream": True, "n": 2, "logprobs": 20}).encode()
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
async def there(dispatcher: FakeDispatcher) -> AsyncIterator[Clients]:
    async with opened(dispatcher, max_requests=8) as (clients, _):
        yield clients


def error_of(answer: httpx2.Response) -> dict[str, str | None]:
    error: dict[str, str | None] = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"] and error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "must be between 0 (greedy) and 100"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"top_k": -2}, "top_k", "0 (off) or a positive number"),
        ({"seed": -1}, "seed", "unsigned 64-bit"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"n": 65}, "n", "between 1 and 64"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": 3}, "stop", "valid"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids and numbers"),
        ({"logit_bias": {"1": 1000}}, "logit_bias", "between -100 and 100"),
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [["a"]]}, "prompt[0]", "neither text nor a list of token ids"),
        ({"prompt": [1, 99999]}, "prompt[1]", "token ids end at 255"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 2, "stream": True}, "best_of", "leave out stream"),
        ({"response_format": {"type": "json_object"}}, "response_format", "only text"),
    ],
)
async def test_what_is_wrong_is_named(there: Clients, change: dict[str, object], param: str, words: str) -> None:
    answer = await there.http.post("/v1/completions", json=ASK | change)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in str(error["message"])


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "no messages"),
        ({"messages": "hello"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "only parts with text",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"tool_choice": "required"}, "tool_choice", "none or auto"),
        ({"max_completion_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
async def test_what_is_wrong_in_a_chat_is_named(
    there: Clients, change: dict[str, object], param: str, words: str
) -> None:
    answer = await there.http.post("/v1/chat/completions", json=CHAT | change)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in str(error["message"])


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000])
async def test_what_is_no_object_is_refused(there: Clients, body: bytes) -> None:
    answer = await there.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-diptych-ttft-ms": "soon"}, "x-diptych-ttft-ms"),
        ({"x-diptych-tpot-ms": "0"}, "x-diptych-tpot-ms"),
        ({"x-diptych-timeout-ms": "nan"}, "x-diptych-timeout-ms"),
        ({"x-diptych-slo-class": "a" * 65}, "x-diptych-slo-class"),
        ({"x-diptych-tenant": "a b"}, "x-diptych-tenant"),
        ({"x-request-id": "a/b"}, "x-request-id"),
    ],
)
async def test_a_header_that_cannot_be_used_is_named(there: Clients, headers: dict[str, str], param: str) -> None:
    answer = await there.http.post("/v1/completions", json=ASK, headers=headers)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("raised", "status", "kind", "code", "retry_after"),
    [
        (Rejected("no room", 2.5, "gateway-full"), 429, "rate_limit_error", "no_room", "3"),
        (Unservable("too long for the pools"), 400, "invalid_request_error", "context_length_exceeded", None),
        (DeadlinePassed("route"), 504, "timeout_error", "deadline", None),
        (AttemptsSpent("workers kept failing"), 503, "server_error", "attempts_spent", "1"),
        (RuntimeError("nobody foresaw this"), 500, "server_error", "internal", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_cluster_have_their_statuses(
    there: Clients,
    dispatcher: FakeDispatcher,
    raised: Exception,
    status: int,
    kind: str,
    code: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    dispatcher.error = raised
    headers = {"x-request-id": "mine"}
    answer = await there.http.post("/v1/completions", json=ASK | {"stream": stream}, headers=headers)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
    assert answer.headers.get("retry-after") == retry_after
    assert answer.headers["x-request-id"] == "mine"
    assert "nobody foresaw" not in answer.text


async def test_without_workers_it_is_unavailable(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.view = view(WorkerState.DEAD, revision=2)
    dispatcher.error = Rejected("no worker", 1.0)
    answer = await there.http.post("/v1/completions", json=ASK)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "no_workers")


async def test_a_full_gateway_is_a_rate_limit_to_the_sdk(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    asking = [asyncio.create_task(there.http.post("/v1/completions", json=ASK | {"n": 4})) for _ in range(2)]
    while len(dispatcher.running) < 8:
        await asyncio.sleep(0.005)
    with pytest.raises(RateLimitError) as caught:
        await there.openai.completions.create(model="bytes", prompt="hello")
    assert caught.value.code == "no_room" and caught.value.response.headers["retry-after"] == "1"
    dispatcher.hold.set()
    assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]


async def test_an_id_that_runs_already_is_a_conflict(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    named = {"x-request-id": "twice"}
    first = asyncio.create_task(there.http.post("/v1/completions", json=ASK, headers=named))
    while not dispatcher.running:
        await asyncio.sleep(0.005)
    second = await there.http.post("/v1/completions", json=ASK, headers=named)
    assert (second.status_code, error_of(second)["code"]) == (409, "duplicate_request")
    dispatcher.hold.set()
    assert (await first).json()["id"] == "cmpl-twice"


async def test_an_error_in_mid_stream_is_an_event_and_the_end(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    named = {"x-request-id": "cut-me"}
    async with there.http.stream("POST", "/v1/completions", json=ASK | {"stream": True}, headers=named) as answer:
        assert answer.status_code == 200  # it begins once it is accepted
        assert await there.grpc.cancel("cut-me")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[0] == "event: error" and len(lines) == 2
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "cancelled"


async def test_the_sdk_raises_an_error_of_mid_stream(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    stream = await there.openai.completions.create(
        model="bytes", prompt="hello", stream=True, extra_headers={"x-request-id": "cut-me"}
    )
    assert await there.grpc.cancel("cut-me")
    with pytest.raises(APIError, match="was cancelled by its caller"):
        _ = [chunk async for chunk in stream]


async def test_a_cancelled_request_that_has_not_begun_to_answer_is_told_so(
    there: Clients, dispatcher: FakeDispatcher
) -> None:
    dispatcher.hold = asyncio.Event()
    asking = asyncio.create_task(there.http.post("/v1/completions", json=ASK, headers={"x-request-id": "cut-me"}))
    while not await there.grpc.cancel("cut-me"):
        await asyncio.sleep(0.005)
    answer = await asking
    assert (answer.status_code, error_of(answer)["type"]) == (499, "cancelled_error")


async def test_a_body_above_the_bound_is_refused(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_BYTES", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 100

    for content in (b" " * 1001, pieces()):
        answer = await there.http.post("/v1/completions", content=content)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert (await there.http.post("/v1/completions", json=ASK)).status_code == 200


async def test_a_body_that_does_not_come_is_given_up(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.05)
    url = there.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 10\r\n\r\n{")
    async with asyncio.timeout(5):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_client_that_takes_nothing_is_let_go(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "SEND_S", 0.05)
    dispatcher.script = lambda request: b"x" * 3000
    async with opened(dispatcher) as (there, doors):
        url = there.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(HUGE)}\r\n\r\n".encode()
            + HUGE
        )
        assert doors._http is not None
        connected = doors._http._server.server_state.connections
        async with asyncio.timeout(30):
            while len(dispatcher.requests) < 8:
                await asyncio.sleep(0.01)
            assert len(connected) == 1
            while connected or dispatcher.running or (await there.grpc.status()).active_requests:
                await asyncio.sleep(0.01)
        writer.close()
    assert "internal error" not in caplog.text


async def test_the_unexpected_is_logged_under_the_id_of_its_request(
    there: Clients, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.error = ZeroDivisionError("secret detail")
    answer = await there.http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    (logged,) = [record for record in caplog.records if "internal error" in record.getMessage()]
    assert logged.__dict__["request_id"] == "mine"


async def test_what_is_not_there_is_not_found(there: Clients) -> None:
    answer = await there.http.get("/v1/nothing")
    assert (answer.status_code, error_of(answer)["message"]) == (404, "there is nothing at /v1/nothing")
    answer = await there.http.get("/v1/completions")
    assert answer.status_code == 405 and error_of(answer)
    answer = await there.http.get("/v1/models/another")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 8193}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_tokens_that_cannot_be_are_named(there: Clients, path: str, body: object, param: str) -> None:
    answer = await there.http.post(path, json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
