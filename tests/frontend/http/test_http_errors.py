"""Every refusal is OpenAI's error object with the right status, and says which field and when to try again."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
import pytest_asyncio
from openai import APIError, RateLimitError

from cluster.events import AttemptsExhausted, DeadlineExceeded, NotComputable, Rejected, Unservable
from cluster.frontend.http import connection, server
from diptych.view import WorkerState
from tests.frontend.grpc.fake import FakeDispatcher, view
from tests.frontend.http.opened import Clients, opened
from tests.frontend.tokenizers import ByteTokenizer

ASK = {"prompt": "hello", "max_tokens": 4}
HUGE = json.dumps({"prompt": ["hi"] * 4, "max_tokens": 3000, "stream": True, "n": 2, "logprobs": 20}).encode()
MAX_PROMPT_BYTES = 20_000
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
async def there(dispatcher: FakeDispatcher) -> AsyncIterator[Clients]:
    async with opened(dispatcher, max_requests=8, max_prompt_bytes=MAX_PROMPT_BYTES) as (clients, _):
        yield clients


@pytest.fixture(scope="module")
def idle() -> FakeDispatcher:
    """Behind `refusing`: no request gets to it."""
    return FakeDispatcher()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(idle: FakeDispatcher) -> AsyncIterator[Clients]:
    """One server for all that it only refuses."""
    async with opened(idle, max_requests=8, max_prompt_bytes=MAX_PROMPT_BYTES) as (clients, _):
        yield clients


def error_of(answer: httpx2.Response) -> dict[str, str | None]:
    error: dict[str, str | None] = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"] and error["message"]
    return error


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "must be between 0 (greedy) and 100"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"top_k": -2}, "top_k", "0 (off) or a positive number"),
        ({"seed": 2**64}, "seed", "a 64-bit number"),
        ({"seed": -(2**63) - 1}, "seed", "a 64-bit number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, or 0 together with echo"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "at most max_tokens (0)"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 1"),
        ({"n": 65}, "n", "between 1 and 64"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"stop": [""]}, "stop", 'is [""]; it must be at most 16 strings, none of them empty'),
        ({"stop": ["a" * 9000] * 17}, "stop", "aaa... (17 entries); it must be at most 16"),
        ({"stop": ["a", 3]}, "stop[1]", "valid string"),
        ({"stop_token_ids": [-1, 2]}, "stop_token_ids", "is [-1, 2]; it must be token ids"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]", "valid integer"),
        ({"stop": 3}, "stop", "valid"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids and numbers"),
        ({"logit_bias": {"1": 1000}}, "logit_bias", "between -100 and 100"),
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [["a"]]}, "prompt[0]", "neither text nor a list of token ids"),
        ({"prompt": [1, 99999]}, "prompt[1]", "token ids end at 255"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        ({"best_of": 2, "stream": True}, "best_of", "leave out stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"stream_options": {}, "stream": False}, "stream_options", "set stream to true"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "not supported; text, json_object"),
    ],
)
async def test_invalid_fields_are_named(refusing: Clients, change: dict[str, object], param: str, words: str) -> None:
    answer = await refusing.http.post("/v1/completions", json=ASK | change)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in str(error["message"])


@pytest.mark.asyncio(loop_scope="module")
async def test_half_a_surrogate_pair_in_a_stop_string_is_refused(refusing: Clients) -> None:
    raw = json.dumps(ASK | {"stop": ["a", "\ud83c"]})
    answer = await refusing.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "stop")


LONG = "x" * 9000  # a body with it is read beside the event loop


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("more", ["", LONG], ids=["small", "large"])
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": {"text": "a"}}, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content"),
        ({"content": "a"}, "messages[1].role"),
        ({"role": "", "content": "a"}, "messages[1].role"),
        ({"role": 3, "content": "a"}, "messages[1].role"),
        ("hello", "messages[1]"),
    ],
)
async def test_an_invalid_chat_message_has_its_path(refusing: Clients, message: object, param: str, more: str) -> None:
    said = {"messages": [{"role": "user", "content": "a" + more}, message], "max_tokens": 4}
    answer = await refusing.http.post("/v1/chat/completions", json=said)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/completions", "suffix", "end"),
        ("/v1/completions", "prompt_logprobs", 0),
        ("/v1/completions", "truncate_prompt_tokens", 3),
        ("/v1/completions", "bad_words", ["sea"]),
        ("/v1/completions", "allowed_token_ids", [1]),
        ("/v1/completions", "use_beam_search", True),
        ("/v1/completions", "prompt_embeds", "AAAA"),
        ("/v1/chat/completions", "functions", [{"name": "look"}]),
        ("/v1/chat/completions", "function_call", {"name": "look"}),
        ("/v1/chat/completions", "chat_template", "{{ messages }}"),
        ("/v1/completions", "reasoning_effort", "high"),
        ("/v1/chat/completions", "verbosity", "low"),
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
        ("/v1/chat/completions", "return_token_ids", True),
        ("/v1/chat/completions", "cache_salt", "grain"),
        ("/v1/chat/completions", "echo", True),
        ("/v1/completions", "regex", "a+"),
        ("/v1/completions", "priority", 3),
        ("/v1/completions", "request_id", "mine"),
        ("/v1/completions", "return_tokens_as_token_ids", True),
        ("/v1/chat/completions", "continue_final_message", True),
        ("/v1/chat/completions", "add_generation_prompt", False),
        ("/v1/chat/completions", "add_special_tokens", True),
        ("/tokenize", "add_generation_prompt", False),
        ("/tokenize", "add_special_tokens", True),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    refusing: Clients, idle: FakeDispatcher, path: str, name: str, value: object
) -> None:
    body = ASK if path == "/v1/completions" else CHAT
    answer = await refusing.http.post(path, json=body | {name: value})
    assert (answer.status_code, error_of(answer)["param"]) == (400, name)
    assert "not supported" in str(error_of(answer)["message"]) and not idle.requests


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        ("/v1/completions", {"prompt": "x" * 8192}, "prompt", "you requested 8196 tokens (8192 in the prompt, 4"),
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt", "you requested 5004 tokens (5000 in the prompt, 4"),
        ("/v1/completions", {"max_tokens": 4092}, "max_tokens", "you requested 4097 tokens (5 in the prompt, 4092"),
        (
            "/v1/completions",
            {"max_tokens": None, "min_tokens": 4092},
            "min_tokens",
            "you requested 4097 tokens (5 in the prompt, 4092",
        ),
        ("/v1/chat/completions", {"max_tokens": 4092}, "max_tokens", "4092 in the completion"),
        ("/v1/chat/completions", {"max_completion_tokens": 4092}, "max_completion_tokens", "4092 in the completion"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 9000}]},
            "messages",
            "in the prompt, 4 in the completion",
        ),
    ],
)
async def test_a_prompt_that_does_not_fit_has_openais_code(
    refusing: Clients, path: str, change: dict[str, object], param: str, words: str
) -> None:
    answer = await refusing.http.post(path, json=(CHAT if "chat" in path else ASK) | change)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert words in str(error["message"])
    # OpenAI's words, with the bound that holds here: the pools of the fake cluster, not the model's 8192.
    assert str(error["message"]).startswith("This model's maximum context length is 4096 tokens")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "no messages"),
        ({"messages": "hello"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "", "content": "hi"}]}, "messages[0].role", "is empty"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0]",
            "a function with name",
        ),
        (
            {"messages": [{"role": "tool", "content": "3", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
            "no call of an earlier message",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "look"}}]},
            "messages[0].function_call",
            "not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "only parts with text",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"min_tokens": 9}, "min_tokens", "at most max_tokens (4)"),
    ],
)
async def test_invalid_chat_fields_are_named(
    refusing: Clients, change: dict[str, object], param: str, words: str
) -> None:
    answer = await refusing.http.post("/v1/chat/completions", json=CHAT | change)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in str(error["message"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        ("/v1/completions", {"max_token": 4}, "max_token", "did you mean 'max_tokens'?"),
        ("/v1/completions", {"messages": []}, "messages", "is unknown"),
        ("/v1/chat/completions", {"prompt": "hi"}, "prompt", "is unknown"),
        ("/tokenize", {"nonsense" * 99: 1}, ("nonsense" * 99)[:64], "is unknown"),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"usage": 1}},
            "stream_options.usage",
            "is unknown",
        ),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "not supported",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "cost": 1}]}, "messages[0].cost", ""),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache": {}}]}]},
            "messages[0].content.cache",
            "is unknown",
        ),
    ],
)
async def test_unknown_fields_are_refused_by_name(
    refusing: Clients, idle: FakeDispatcher, path: str, change: dict[str, object], param: str, words: str
) -> None:
    answer = await refusing.http.post(path, json=(ASK if path == "/v1/completions" else CHAT) | change)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in str(error["message"]) and not idle.requests


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


@pytest.mark.parametrize("field", ["tools[0]", "chat_template_kwargs"])
async def test_json_that_is_nested_too_deep_is_refused_and_logs_nothing(
    there: Clients, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    value = [nested(500)] if field == "tools[0]" else nested(500)
    body = {"messages": CHAT["messages"], field.partition("[")[0]: value}
    with caplog.at_level("WARNING"):
        answer = await there.http.post("/tokenize", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, field)
    assert "more than 64 levels deep" in answer.text and not caplog.records


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_not_an_object_is_refused(refusing: Clients, body: bytes) -> None:
    answer = await refusing.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-diptych-ttft-ms": "soon"}, "x-diptych-ttft-ms"),
        ({"x-diptych-tpot-ms": "0"}, "x-diptych-tpot-ms"),
        ({"x-diptych-timeout-ms": "nan"}, "x-diptych-timeout-ms"),
        ({"x-diptych-slo-class": "a" * 65}, "x-diptych-slo-class"),
        ({"x-diptych-tenant": "a b"}, "x-diptych-tenant"),
    ],
)
async def test_an_invalid_header_is_named(refusing: Clients, headers: dict[str, str], param: str) -> None:
    answer = await refusing.http.post("/v1/completions", json=ASK, headers=headers)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("raised", "status", "kind", "code", "retry_after"),
    [
        (Rejected("no room", 2.5, "gateway-full"), 429, "rate_limit_error", "no_room", "3"),
        (Unservable("too long for the pools"), 400, "invalid_request_error", "context_length_exceeded", None),
        (DeadlineExceeded("route"), 504, "timeout_error", "deadline", None),
        (AttemptsExhausted("workers kept failing"), 503, "server_error", "attempts_spent", "1"),
        (NotComputable("the logits are not finite"), 500, "server_error", "not_computable", None),
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


async def test_an_error_in_mid_stream_is_the_last_event(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    named = {"x-request-id": "cut-me"}
    async with there.http.stream("POST", "/v1/completions", json=ASK | {"stream": True}, headers=named) as answer:
        assert answer.status_code == 200  # it begins once it is accepted
        assert await there.grpc.cancel("cut-me")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[0] == "event: error" and len(lines) == 2
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "cancelled"


async def test_the_openai_sdk_raises_a_mid_stream_error(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    stream = await there.openai.completions.create(
        model="bytes", prompt="hello", stream=True, extra_headers={"x-request-id": "cut-me"}
    )
    assert await there.grpc.cancel("cut-me")
    with pytest.raises(APIError, match="was cancelled by its caller"):
        _ = [chunk async for chunk in stream]


async def test_a_request_cancelled_before_its_response_gets_an_error_status(
    there: Clients, dispatcher: FakeDispatcher
) -> None:
    dispatcher.hold = asyncio.Event()
    asking = asyncio.create_task(there.http.post("/v1/completions", json=ASK, headers={"x-request-id": "cut-me"}))
    while not await there.grpc.cancel("cut-me"):
        await asyncio.sleep(0.005)
    answer = await asking
    assert (answer.status_code, error_of(answer)["type"]) == (499, "cancelled_error")


async def test_a_body_above_the_limit_is_refused(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 100

    for content in (b" " * 1001, pieces()):
        answer = await there.http.post("/v1/completions", content=content)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert (await there.http.post("/v1/completions", json=ASK)).status_code == 200


async def test_a_client_that_closes_after_its_request_gets_the_error_of_a_body_that_is_refused_unread(
    there: Clients,
) -> None:
    """Closing over unread bytes would reset the connection."""
    url = there.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    size = connection.MAX_BODY_BYTES + 1
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % size + b" " * size)
    await writer.drain()
    async with asyncio.timeout(10.0):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answer


async def test_a_body_that_cannot_fit_into_the_context_is_refused_unread(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIELDS_BYTES", 200)
    monkeypatch.setattr(ByteTokenizer, "longest_text_bytes", 100)
    fits, cannot = ({"messages": [{"role": "user", "content": "\0" * size}], "max_tokens": 4} for size in (100, 200))
    async with opened(dispatcher) as (there, _):
        assert (await there.http.post("/v1/chat/completions", json=fits)).status_code == 200
        answer = await there.http.post("/v1/chat/completions", json=cannot)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
        assert str(error_of(answer)["message"]).startswith("This model's maximum context length is ")
        many = {"prompt": ["\0" * 100] * 3, "max_tokens": 4}
        assert (await there.http.post("/v1/completions", json=many)).status_code == 200, "each of them fits"


async def test_a_body_that_never_arrives_times_out(there: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.05)
    url = there.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 10\r\n\r\n{")
    async with asyncio.timeout(30.0):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_client_that_reads_nothing_is_disconnected(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.05)
    dispatcher.script = lambda request: b"x" * 3000
    async with opened(dispatcher) as (there, servers):
        url = there.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(HUGE)}\r\n\r\n".encode()
            + HUGE
        )
        assert servers._http is not None
        connected = servers._http._server.server_state.connections
        async with asyncio.timeout(30):
            while len(dispatcher.requests) < 8:
                await asyncio.sleep(0.01)
            assert len(connected) == 1
            while connected or dispatcher.running or (await there.grpc.status()).active_requests:
                await asyncio.sleep(0.01)
        writer.close()
    assert "internal error" not in caplog.text


async def test_unexpected_errors_are_logged_with_the_request_id(
    there: Clients, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.error = ZeroDivisionError("secret detail")
    answer = await there.http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    (logged,) = [record for record in caplog.records if "internal error" in record.getMessage()]
    assert logged.__dict__["request_id"].startswith("mine-")


async def test_an_unknown_path_is_not_found(there: Clients) -> None:
    answer = await there.http.get("/v1/nothing")
    assert (answer.status_code, error_of(answer)["message"]) == (404, "there is nothing at /v1/nothing")
    answer = await there.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST") and error_of(answer)
    answer = await there.http.get("/v1/models/another")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a" * (MAX_PROMPT_BYTES + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * (MAX_PROMPT_BYTES + 1)}]}, "messages"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 8193}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_invalid_token_ids_are_named(refusing: Clients, path: str, body: object, param: str) -> None:
    answer = await refusing.http.post(path, json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_the_reported_maximum_length_is_enforced(there: Clients) -> None:
    """The model's context has 8192 tokens, the pools of the fake cluster hold 4096."""
    received = (await there.http.get("/v1/models")).json()["data"][0]["max_model_len"]
    assert received == 4096 == (await there.http.post("/tokenize", json={"prompt": "x"})).json()["max_model_len"]
    fits = {"prompt": "x" * 100, "max_tokens": received - 100}
    assert (await there.http.post("/v1/completions", json=fits)).status_code == 200
    above = await there.http.post("/v1/completions", json=fits | {"max_tokens": received - 99})
    assert above.status_code == 400 and f"is {received} tokens" in str(error_of(above)["message"])
