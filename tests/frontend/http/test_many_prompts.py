"""One body may have many prompts: they run some at a time, in order, and leave room for others."""

import asyncio
from typing import Any

import pytest

from cluster.frontend.http.bodies import MAX_PROMPTS
from cluster.frontend.http.reply import MAX_CONCURRENT_PROMPTS
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients

HEARD_S = 20.0


def asked(count: int, **change: Any) -> dict[str, Any]:
    return {"prompt": [f"{number} " for number in range(count)], "max_tokens": 1, "echo": True} | change


async def begun(dispatcher: FakeDispatcher, count: int) -> None:
    async with asyncio.timeout(HEARD_S):
        while len(dispatcher.requests) < count:
            await asyncio.sleep(0.01)


async def test_the_maximum_number_of_prompts_is_answered_in_order(there: Clients) -> None:
    answer = await there.http.post("/v1/completions", json=asked(MAX_PROMPTS))
    assert answer.status_code == 200, answer.text
    received = answer.json()["choices"]
    assert [each["index"] for each in received] == list(range(MAX_PROMPTS))
    assert [each["text"] for each in received] == [f"{number} a" for number in range(MAX_PROMPTS)]


async def test_a_stream_has_the_answers_of_all_prompts(there: Clients) -> None:
    stream = await there.openai.completions.create(model="", stream=True, prompt=["a"] * 100, max_tokens=1)
    ends = [choice.index async for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == list(range(100))


@pytest.mark.parametrize("count", [MAX_CONCURRENT_PROMPTS + 6])
async def test_concurrent_prompts_are_limited_and_waiting_counts_toward_the_deadline(
    there: Clients, dispatcher: FakeDispatcher, count: int
) -> None:
    dispatcher.hold = asyncio.Event()
    headers = {"x-diptych-timeout-ms": "60000"}
    whole = asyncio.ensure_future(there.http.post("/v1/completions", json=asked(count), headers=headers))
    await begun(dispatcher, MAX_CONCURRENT_PROMPTS)
    await asyncio.sleep(0.2)
    assert len(dispatcher.requests) == MAX_CONCURRENT_PROMPTS == len(dispatcher.running)
    dispatcher.hold.set()
    assert (await whole).status_code == 200
    prompts = [bytes(request.prompt).decode() for request in dispatcher.requests]
    assert prompts == [f"{number} " for number in range(count)]
    first, last = dispatcher.deadlines[0], dispatcher.deadlines[-1]
    assert first is not None and last is not None and last < first - 0.15


async def test_a_disconnected_client_cancels_waiting_prompts_too(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    whole = asyncio.ensure_future(there.http.post("/v1/completions", json=asked(MAX_CONCURRENT_PROMPTS + 6)))
    await begun(dispatcher, MAX_CONCURRENT_PROMPTS)
    whole.cancel()
    async with asyncio.timeout(HEARD_S):
        while dispatcher.running:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert len(dispatcher.requests) == MAX_CONCURRENT_PROMPTS
