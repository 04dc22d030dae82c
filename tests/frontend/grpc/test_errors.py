"""Every refusal and failure: its code, its details, and a sentence that says what to do."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.events import AttemptsExhausted, DeadlineExceeded, NotComputable, Rejected, Unservable
from cluster.frontend.auth import Authenticator
from cluster.frontend.grpc.sender import Sender, abort
from cluster.frontend.grpc.server import GrpcServer
from cluster.frontend.grpc.services import InferenceService, add_inference_service, deadline_of
from cluster.frontend.grpc.statuses import code_name, status_of
from cluster.frontend.served_models import ServedModels
from cluster.spec import GatewaySpec
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.retry import Retry
from diptych.view import WorkerState
from tests.frontend.grpc.conftest import OpenClient
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context, gateway_without_servers, view
from tests.frontend.tokenizers import ByteTokenizer


async def failure(client: AsyncClient, prompt: Any = "hello", **options: Any) -> DiptychError:
    with pytest.raises(DiptychError) as caught:
        await client.complete(prompt, **options)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "options", "field", "words"),
    [
        ("", {}, "prompt.text", ["empty"]),
        ([], {}, "prompt.tokens", ["empty"]),
        ([1, 256], {}, "prompt.tokens[1]", ["256", "255"]),
        ("a" * 9000, {}, "prompt", ["9000", "4096"]),
        ("a" * 5000, {}, "prompt", ["5000", "4096"]),
        ("hello", {"max_tokens": 4092}, "sampling.max_tokens", ["4092", "4096"]),
        ("hello", {"max_tokens": 0}, "sampling.max_tokens", ["at least 1"]),
        ("hello", {"temperature": -1.0}, "sampling.temperature", ["-1.0", "0 (greedy)"]),
        ("hello", {"temperature": float("nan")}, "sampling.temperature", ["nan"]),
        ("hello", {"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens", ["max_tokens (4)"]),
        ("hello", {"stop": [""]}, "sampling.stop", ["empty"]),
        ("hello", {"stop": ["x" * 1025]}, "sampling.stop", ["1024"]),
        ("hello", {"stop_token_ids": [999]}, "sampling.stop_token_ids[0]", ["999", "255"]),
        ("hello", {"seed": -1}, "sampling.seed", ["-1"]),
        ("hello", {"top_k": "many"}, "sampling.top_k", ["many"]),
        ("hello", {"request_id": "a/b"}, "request_id", ["a/b"]),
    ],
)
async def test_bad_input_names_its_field(
    client: AsyncClient, prompt: Any, options: dict[str, Any], field: str, words: list[str]
) -> None:
    error = await failure(client, prompt, **options)
    assert (error.code, error.field) == ("INVALID_ARGUMENT", field)
    assert all(word in str(error) for word in words), str(error)


@pytest.mark.parametrize(("prompt", "options"), [("a" * 9000, {}), ("a" * 5000, {}), ("hello", {"max_tokens": 4092})])
async def test_a_prompt_that_does_not_fit_has_its_own_reason(
    client: AsyncClient, prompt: str, options: dict[str, Any]
) -> None:
    assert (await failure(client, prompt, **options)).reason == "TOO_LONG"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "prompt.chat"),
        ([("", "hi")], "prompt.chat.messages[0].role"),
    ],
)
async def test_invalid_chat_messages_have_their_path(client: AsyncClient, messages: list[Any], field: str) -> None:
    with pytest.raises(DiptychError) as caught:
        await anext(client.chat(messages))
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", field)


async def test_a_prompt_of_too_many_bytes_is_not_tokenized(open_client: OpenClient) -> None:
    error = await failure(await open_client(max_prompt_bytes=10), "a" * 11)
    assert error.field == "prompt" and "11 bytes" in str(error)


async def test_unknown_model(client: AsyncClient) -> None:
    error = await failure(client, model="gpt-17")
    assert (error.code, error.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")
    assert "'bytes'" in str(error)
    assert (await client.complete("hello", model="bytes", max_tokens=1)).text == "a"


async def test_a_duplicate_id_is_refused(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.01
    events = client.generate("hello", request_id="mine", max_tokens=4000)
    await anext(events)
    assert (await failure(client, request_id="mine")).code == "ALREADY_EXISTS"
    await events.aclose()


async def test_a_full_gateway_returns_a_retry_time(open_client: OpenClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.01
    client = await open_client(max_requests=1)
    events = client.generate("hello", max_tokens=4000)
    await anext(events)
    error = await failure(client)
    assert (error.code, error.retry_after_s, error.reason) == ("RESOURCE_EXHAUSTED", 1.0, "NO_ROOM")
    await events.aclose()


@pytest.mark.parametrize(
    ("raised", "code", "reason", "retry_after_s"),
    [
        (Rejected("all decode workers are full", 2.5), "RESOURCE_EXHAUSTED", "NO_ROOM", 2.5),
        (Unservable("the prompt is too long"), "INVALID_ARGUMENT", "TOO_LONG", None),
        (AttemptsExhausted("6 attempts failed; the last: worker gone"), "UNAVAILABLE", "ATTEMPTS_SPENT", 1.0),
        (DeadlineExceeded("prefill"), "DEADLINE_EXCEEDED", "DEADLINE", None),
        (NotComputable("decode-0: the logits are not finite"), "INTERNAL", "NOT_COMPUTABLE", None),
    ],
)
async def test_cluster_errors_have_their_code_and_details(
    client: AsyncClient,
    dispatcher: FakeDispatcher,
    raised: Exception,
    code: str,
    reason: str,
    retry_after_s: float | None,
) -> None:
    dispatcher.error = raised
    error = await failure(client)
    assert (error.code, error.reason, error.retry_after_s) == (code, reason, retry_after_s)
    assert error.message == str(raised)


async def test_no_worker_in_time_is_unavailable(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.view = view(WorkerState.STARTING)
    dispatcher.error = Rejected("no prefill worker was ready within 60 s", 1.0)
    error = await failure(client)
    assert (error.code, error.reason, error.retry_after_s) == ("UNAVAILABLE", "NO_WORKERS", 1.0)


async def test_the_deadline_reaches_the_dispatcher(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    """About: gRPC counts it on the wall clock, which may be set while the call is under way."""
    await client.complete("hello", max_tokens=1, timeout_s=100.0)
    await client.complete("hello", max_tokens=1)
    assert dispatcher.deadlines[0] is not None and 50.0 < dispatcher.deadlines[0] < 150.0
    assert dispatcher.deadlines[1] is None


@pytest.mark.parametrize(("left_s", "expected_s"), [(10.0, 9.95), (0.2, 0.18), (0.0, 0.0), (None, None)])
def test_the_dispatcher_gets_a_slightly_earlier_deadline(left_s: float | None, expected_s: float | None) -> None:
    """So that the answer which names the phase still reaches the client."""
    context = SimpleNamespace(time_remaining=lambda: left_s)
    assert deadline_of(context) == expected_s  # type: ignore[arg-type]


async def test_a_call_past_its_deadline_is_cancelled(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.05
    error = await failure(client, max_tokens=4000, timeout_s=0.3)
    assert error.code == "DEADLINE_EXCEEDED"


async def test_unexpected_errors_are_logged_with_the_id_that_the_client_gets(
    client: AsyncClient, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.error = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR):
        error = await failure(client)
    assert error.code == "INTERNAL" and "secret detail" not in str(error)
    error_id = error.message.split()[-1]
    assert any(error_id in record.getMessage() and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("given", ["mine", ""])
async def test_unexpected_errors_are_logged_with_the_request_id(
    client: AsyncClient, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    dispatcher.error = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR):
        await failure(client, request_id=given)
        results = [result async for _, result in client.batch(["hi"], max_tokens=1)]
    assert len(results) == 1
    logged = [record for record in caplog.records if "internal error" in record.getMessage()]
    named = [request.id for request in dispatcher.requests]
    assert [record.__dict__["request_id"] for record in logged] == named and all(named) and len(named) == 2
    assert named[0] == given or named[0].startswith("req-")


async def test_what_a_client_that_has_left_does_not_get_is_no_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    """grpc cancels a call's task only after the call itself: what the task sends in between fails."""
    begun, failed = asyncio.Event(), asyncio.Queue[Exception]()
    tasks = []

    async def answer(context: Any, left: asyncio.Event) -> None:
        await left.wait()
        for sending in Sender(context).send(b"late"), abort(context, status_of(DeadlineExceeded("decode"), True)):
            try:
                await sending
            except Exception as error:
                failed.put_nowait(error)

    async def call(request: bytes, context: Any) -> None:
        left = asyncio.Event()
        tasks.append(asyncio.create_task(answer(context, left)))
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    server = grpc.aio.server()
    handlers: Any = {"Call": grpc.unary_stream_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Late", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(30.0):
        method: Any = channel.unary_stream("/test.Late/Call")
        sent = method(b"")
        await begun.wait()
        sent.cancel()
        unsent, aborted = await failed.get(), await failed.get()
    await server.stop(0)
    assert code_name(status_of(unsent, True).code) == "CANCELLED"
    assert isinstance(aborted, grpc.aio.AbortError)
    assert not caplog.records


async def test_an_unreachable_endpoint_is_one_clear_error() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        error = await failure(client)
    assert error.code == "UNAVAILABLE"
    assert error.message.startswith("nothing answers at 127.0.0.1:1")


async def test_a_port_in_use_raises_a_clear_oserror(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    port = int(client.endpoint.rpartition(":")[2])
    server = GrpcServer(gateway_context(dispatcher, grpc_port=port), ByteTokenizer)
    with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\)"):
        await server.open()
    await server.close(0)


class Dropping(InferenceService):
    """Of a server that ends: the first calls are dropped, as gRPC does it, without a word of ours."""

    left = 0

    async def Generate(self, request: Any, context: Any) -> None:
        if self.left:
            self.left -= 1
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        await super().Generate(request, context)


@asynccontextmanager
async def dropping(dispatcher: FakeDispatcher, count: int) -> AsyncIterator[str]:
    server = grpc.aio.server()
    context = gateway_context(dispatcher)
    service = Dropping(
        ServedModels(context, [gateway_without_servers(context, ByteTokenizer())]), Authenticator(GatewaySpec())
    )
    service.left = count
    add_inference_service(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_dropped_call_may_be_retried(dispatcher: FakeDispatcher) -> None:
    async with dropping(dispatcher, 1) as endpoint, AsyncClient(endpoint) as client:
        error = await failure(client)
        assert error.code == "UNAVAILABLE" and endpoint in error.message and "it may be shutting down" in error.message
    async with dropping(dispatcher, 2) as endpoint, AsyncClient(endpoint, retry=Retry(wait_s=0.01)) as client:
        assert (await client.complete("hello", max_tokens=3)).completed.completion_tokens == 3


async def test_a_request_that_was_cancelled_by_its_id_is_not_retried(dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    async with dropping(dispatcher, 0) as endpoint, AsyncClient(endpoint, retry=Retry()) as client:
        asked = asyncio.ensure_future(failure(client, request_id="mine"))
        while not dispatcher.running:
            await asyncio.sleep(0.01)
        async with AsyncClient(endpoint) as other:
            assert await other.cancel("mine")
        assert ((await asked).code, (await asked).reason) == ("CANCELLED", "CANCELLED")
