"""Every answer of a server is counted by its code, refusals too, so that an operator has an error rate."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.events import Rejected
from diptych.errors import DiptychError
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, opened

ASK = {"prompt": "hello", "max_tokens": 4}


async def counted(there: Clients) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for family in text_string_to_metric_families((await there.http.get("/metrics")).text):
        for sample in family.samples:
            if sample.name == "diptych_responses_total":
                labels = sample.labels
                found[labels["api"], labels["method"], labels["code"]] += int(sample.value)
    return found


async def grpc_responses(there: Clients, count: int) -> Counter[tuple[str, str]]:
    """Responses by method and code, once there are `count`: a client has an error's status before it is counted."""
    async with asyncio.timeout(30.0):
        while True:
            found = {key[1:]: number for key, number in (await counted(there)).items() if key[0] == "grpc"}
            if sum(found.values()) >= count:
                return Counter(found)
            await asyncio.sleep(0.005)


async def test_http_responses_are_counted_by_status(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher, max_requests=2) as (there, _):
        before = await counted(there)
        assert before["http", "chat", "200"] == before["grpc", "Generate", "INTERNAL"] == 0
        for change, path in (
            ({}, "/v1/completions"),
            ({"temperature": -1}, "/v1/completions"),
            ({"prompt": "x" * 9000}, "/v1/completions"),
            ({"model": "another"}, "/v1/completions"),
            ({"n": 3}, "/v1/completions"),
            ({"max_tokens": None}, "/tokenize"),
            ({}, "/v1/nowhere"),
        ):
            await there.http.post(path, json=ASK | change)
        await there.http.post("/v1/completions", content=b"{")
        await there.http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 16})
        message = {"messages": [{"role": "user", "content": "hi"}]}
        await there.http.post("/v1/messages", json=message)  # without max_tokens
        await there.http.post("/v1/messages/count_tokens", json=message)
        dispatcher.error = RuntimeError("nobody foresaw this")
        await there.http.post("/v1/completions", json=ASK)
        dispatcher.error = Rejected("full", 1.0, "no-room")
        await there.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        received = await counted(there) - before
    assert {key[1:]: count for key, count in received.items() if key[1] != "other"} == {
        ("completions", "200"): 1,
        ("completions", "400"): 4,
        ("completions", "404"): 1,
        ("completions", "500"): 1,
        ("chat", "429"): 1,
        ("tokenize", "200"): 1,
        ("responses", "200"): 1,
        ("messages", "400"): 1,
        ("count_tokens", "200"): 1,
    }
    assert received["http", "other", "404"] == 1


async def test_a_failed_stream_counts_as_its_error_and_an_abandoned_one_as_499(
    dispatcher: FakeDispatcher,
) -> None:
    async with opened(dispatcher) as (there, _):
        dispatcher.hold = asyncio.Event()
        asking = asyncio.create_task(there.http.post("/v1/completions", json=ASK | {"stream": True}))
        while not dispatcher.running:
            await asyncio.sleep(0.005)
        (name,) = dispatcher.running
        await asyncio.sleep(0.05)  # its status is under way
        await there.grpc.cancel(name)
        assert "event: error" in (await asking).text
        leaving = asyncio.create_task(there.http.post("/v1/completions", json=ASK))
        while not dispatcher.running:
            await asyncio.sleep(0.005)
        leaving.cancel()
        while dispatcher.running:
            await asyncio.sleep(0.005)
        async with asyncio.timeout(30.0):
            while (await counted(there))["http", "completions", "499"] < 2:
                await asyncio.sleep(0.005)
        assert (await counted(there))["http", "completions", "200"] == 0


async def test_grpc_responses_are_counted_by_code(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher) as (there, _):
        assert not +await grpc_responses(there, 0)
        await there.grpc.complete("hello", max_tokens=2)
        for options in ({"temperature": -1.0}, {"max_tokens": 9000}, {"model": "another"}):
            with pytest.raises(DiptychError):
                await there.grpc.complete("hello", **options)
        _ = [each async for each in there.grpc.batch(["one", ""], max_tokens=1)]
        dispatcher.error = RuntimeError("nobody foresaw this")
        with pytest.raises(DiptychError):
            await there.grpc.complete("hello")
        received = await grpc_responses(there, 8)
    assert +received == {
        ("Generate", "OK"): 2,
        ("Generate", "INVALID_ARGUMENT"): 3,
        ("Generate", "NOT_FOUND"): 1,
        ("Generate", "INTERNAL"): 1,
        ("GenerateBatch", "OK"): 1,
    }


async def test_an_undecodable_message_is_invalid_argument(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher) as (there, _), grpc.aio.insecure_channel(there.grpc.endpoint) as channel:
        for kind, method in ((channel.unary_stream, "Generate"), (channel.unary_unary, "Cancel")):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                call: Any = cast(Any, kind)(f"/diptych.v1.InferenceService/{method}")(b"\xff\xff\xff")
                _ = [each async for each in call] if method == "Generate" else await call
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "cannot be decoded" in str(failure.value.details())
        received = await grpc_responses(there, 2)
    assert +received == {("Generate", "INVALID_ARGUMENT"): 1, ("Cancel", "INVALID_ARGUMENT"): 1}


async def test_a_refused_key_counts_on_both_servers(dispatcher: FakeDispatcher, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    async with opened(dispatcher, api_keys_file=str(keys)) as (there, servers):
        await there.http.post("/v1/completions", json=ASK)
        with pytest.raises(DiptychError):
            await there.grpc.complete("hello")
        async with asyncio.timeout(30.0):
            while sum((received := dict(servers._grpc.models.responses.rows())).values()) < 2:
                await asyncio.sleep(0.005)
    assert received["http", "completions", "401"] == received["grpc", "Generate", "UNAUTHENTICATED"] == 1
