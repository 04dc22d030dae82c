"""One request's reply, from the gateway's events to HTTP: whole, or as server-sent events.

The reply begins once workers are chosen, so its headers can tell what was predicted; a request that fails before has a
status of its own, one that fails later an `error` event. A client that goes away cancels it wherever it waits.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.events import Accepted, Completed
from cluster.frontend.gateway import Gateway, servable
from cluster.frontend.http.counted import ENDING
from cluster.frontend.http.failures import Failure, failure_of
from cluster.frontend.http.shapes import Choice, Shape, Usage, finishes
from cluster.frontend.http.terms import Terms
from cluster.frontend.text import GatewayEvent, GenerationInput, TextDelta, TextEnd
from workers.request import FinishReason, SamplingParams

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
MOST_HERE = 512  # log probabilities that are written in the event loop: 6 ms, measured
MOST_AT_ONCE = 64  # prompts of one request; the others wait here, and hold no place of the gateway


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read and checked. Answer i to prompt p has the index p * n + i."""

    prompts: Sequence[GenerationInput]
    sampling: SamplingParams
    terms: Terms
    model: str
    sent: Mapping[str, str]  # as `Body.sent`
    stream: bool
    include_usage: bool
    usage_in_chunks: bool = False

    scores_only: bool = False  # the answers themselves are dropped

    def events(self, gateway: Gateway) -> list[AsyncGenerator[GatewayEvent, None]]:
        """One iterator for each prompt; closing it cancels it."""
        arrived_s = time.monotonic()
        return [self._events(gateway, index, arrived_s) for index in range(len(self.prompts))]

    async def _events(self, gateway: Gateway, index: int, arrived_s: float) -> AsyncGenerator[GatewayEvent, None]:
        """The deadline counts from the arrival of the whole request, however long this prompt waited for others."""
        terms, unique = self.terms, self.terms.name.unique
        waited_s = time.monotonic() - arrived_s
        events = gateway.generate(
            self.prompts[index],
            self.sampling,
            slo=terms.slo,
            request_id=f"{unique}.{index}" if len(self.prompts) > 1 else unique,
            called=terms.name.given,
            deadline_s=None if terms.deadline_s is None else terms.deadline_s - waited_s,
            session=terms.session,
            model=self.model,
            tenant=terms.tenant,
        )
        async with aclosing(events):
            async for event in events:
                yield scores_of(event) if self.scores_only else event


class Reply(Response):
    """Runs the request while it is sent. Owned by its connection.

    `apart` lets one reply at a time write in a thread: each more would take from the event loop's share of the GIL.
    """

    def __init__(self, gateway: Gateway, asked: Asked, shape: Shape, model: str, apart: asyncio.Semaphore) -> None:
        super().__init__()
        self._apart = apart
        self._gateway = gateway
        self._asked = asked
        self._shape = shape
        self._begun = False
        self._told = {
            "id": f"{shape.prefix}-{asked.terms.name.unique}",
            "object": shape.chunk_kind if asked.stream else shape.whole_kind,
            "created": int(time.time()),
            "model": model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(together(self._asked.events(self._gateway))) as events:
                await (self._stream(events, send) if self._asked.stream else self._whole(events, send))
        except Exception as error:
            ready, name = servable(self._gateway.view), self._asked.terms.name
            failure = failure_of(error, ready, name.unique, self._asked.sent)
            if not self._begun:
                await failed(failure)(scope, receive, send)
                return
            scope[ENDING].status = failure.status
            await _more(send, b"event: error\ndata: " + failure.body + b"\n\n", last=True)

    async def _whole(self, events: AsyncGenerator[tuple[int, GatewayEvent], None], send: Send) -> None:
        accepted: Accepted | None = None
        heard: defaultdict[int, list[TextDelta]] = defaultdict(list)
        ends: dict[int, Completed] = {}
        usage = Usage()
        async for prompt, event in events:
            match event:
                case Accepted():
                    accepted = accepted or event
                case TextDelta():
                    heard[self._place(prompt, event.index)].append(event)
                case Completed():
                    ends[prompt] = event
                    usage.add(event)
        assert accepted is not None, "what is completed was accepted"
        answers = [
            (place, TextDelta.join(heard.pop(place, ())), finish)
            for prompt, end in sorted(ends.items())
            for place, finish in ((self._place(prompt, index), finish) for index, finish in enumerate(finishes(end)))
        ]
        apart = any(_is_long(delta) for _, delta, _ in answers)  # all: they may repeat the scores of one prompt
        choices = []
        for answer in answers:
            choices.append(await self._written(partial(self._shape.whole, *answer), apart))
            await asyncio.sleep(0)  # many short ones take long, too
        body = msgspec.json.encode(self._told | {"choices": choices, "usage": usage.told})
        await self._begin(accepted, {"content-type": JSON, "content-length": str(len(body))}, send)
        await _more(send, body, last=True)

    async def _stream(self, events: AsyncGenerator[tuple[int, GatewayEvent], None], send: Send) -> None:
        usage, so_far = Usage(), Usage()
        prompts: dict[int, int] = {}
        async for prompt, event in events:
            match event:
                case Accepted():
                    prompts[prompt] = event.prompt_tokens
                    so_far.prompt_tokens = sum(prompts.values())
                    if not self._begun:
                        await self._begin(event, {"content-type": EVENTS, "x-accel-buffering": "no"}, send)
                case TextDelta():
                    so_far.completion_tokens += len(event.tokens)
                    counted = self._counted(so_far)
                    # Text may still be held back: half a character, or of a stop.
                    if event.text or event.logprobs or event.prompt_logprobs or counted:
                        part = partial(self._shape.part, self._place(prompt, event.index), event)
                        choices = [await self._written(part, _is_long(event))]
                        await _more(send, self._chunk(choices, counted))
                case TextEnd():
                    end = partial(self._shape.end, self._place(prompt, event.index), event.finish)
                    choices = [await self._written(end, apart=False)]
                    await _more(send, self._chunk(choices, self._counted(so_far)))
                case Completed():
                    usage.add(event)
        counts = self._chunk([], usage.told) if self._asked.include_usage else b""
        await _more(send, counts + b"data: [DONE]\n\n", last=True)

    async def _written(self, tell: Callable[[], Choice], apart: bool) -> msgspec.Raw:
        """A choice as JSON. `apart`: in a thread, since others' tokens are due meanwhile."""

        def written() -> msgspec.Raw:
            return msgspec.Raw(msgspec.json.encode(tell()))

        if not apart:
            return written()
        async with self._apart:
            return await asyncio.to_thread(written)

    def _counted(self, so_far: Usage) -> dict[str, Any] | None:
        return so_far.told if self._asked.usage_in_chunks else None

    def _place(self, prompt: int, index: int) -> int:
        return prompt * self._asked.sampling.n + index

    def _chunk(self, choices: list[msgspec.Raw], usage: dict[str, Any] | None = None) -> bytes:
        told = self._told | {"choices": choices}
        if self._asked.include_usage:
            told["usage"] = usage
        return b"data: " + msgspec.json.encode(told) + b"\n\n"

    async def _begin(self, accepted: Accepted, headers: dict[str, str], send: Send) -> None:
        headers |= {"cache-control": "no-store"}
        for name, predicted_s in (("ttft", accepted.predicted_ttft_s), ("tpot", accepted.predicted_tpot_s)):
            if predicted_s is not None:
                headers[f"x-diptych-predicted-{name}-ms"] = f"{1000 * predicted_s:.3f}"
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": pairs})


def failed(failure: Failure) -> Response:
    """The response for a request that has no answer."""
    return Response(failure.body, failure.status, failure.headers, JSON)


def scores_of(event: GatewayEvent) -> GatewayEvent:
    """Without what was drawn: a prompt's own scores, and an answer of no token."""
    match event:
        case TextDelta():
            return TextDelta("", (), 0, prompt_logprobs=event.prompt_logprobs, index=event.index)
        case TextEnd():
            return replace(event, finish=FinishReason.LENGTH)
        case Completed():
            answers = tuple(replace(each, finish=FinishReason.LENGTH) for each in event.answers)
            return replace(event, finish=FinishReason.LENGTH, completion_tokens=0, answers=answers)
    return event


async def together(
    streams: Sequence[AsyncGenerator[GatewayEvent, None]],
) -> AsyncGenerator[tuple[int, GatewayEvent], None]:
    """(which, event) of all streams as they come, `MOST_AT_ONCE` at a time, in their order.

    The first error ends them all; closing the iterator does too.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, GatewayEvent] | Exception | None] = asyncio.Queue(1)
    room = asyncio.Semaphore(MOST_AT_ONCE)

    async def follow(index: int, stream: AsyncGenerator[GatewayEvent, None]) -> None:
        try:
            async with room, aclosing(stream) as events:
                async for event in events:
                    await queue.put((index, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    following = [asyncio.create_task(follow(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(following)
        while running:
            heard = await queue.get()
            if isinstance(heard, Exception):
                raise heard
            if heard is None:
                running -= 1
            else:
                yield heard
    finally:
        for task in following:
            task.cancel()
        await asyncio.wait(following)


def _is_long(delta: TextDelta) -> bool:
    return sum(1 + len(each.top) for each in (*delta.logprobs, *delta.prompt_logprobs)) > MOST_HERE


async def _more(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
