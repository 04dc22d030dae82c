"""The HTTP response to one request: a JSON body, or server-sent events.

The response starts once workers are chosen, so its headers have the predictions. A request that fails earlier gets an
error status; one that fails later gets an `error` event. A client that disconnects cancels its request.
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
from cluster.frontend.http.failures import JSON, failure_of
from cluster.frontend.http.formats import Choice, Format, Usage, finishes
from cluster.frontend.http.headers import RequestHeaders
from cluster.frontend.http.middleware import OUTCOME
from cluster.frontend.text import GatewayEvent, PromptInput, TextDelta, TextEnd
from workers.request import FinishReason, SamplingParams

EVENTS = "text/event-stream; charset=utf-8"
MAX_LOGPROBS = 512  # more are encoded in a thread; these take 6 ms, measured
MAX_CONCURRENT_PROMPTS = 64  # of one request; the others wait here, outside of the gateway's limits


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request. Answer i to prompt p is choice p * n + i."""

    prompts: Sequence[PromptInput]
    sampling: SamplingParams
    headers: RequestHeaders
    model: str
    client_names: Mapping[str, str]  # see `Body`
    stream: bool
    include_usage: bool
    usage_in_chunks: bool
    scores_only: bool  # the answers themselves are dropped

    def events(self, gateway: Gateway) -> list[AsyncGenerator[GatewayEvent, None]]:
        """One iterator for each prompt; closing it cancels the prompt's request."""
        arrived_s = time.monotonic()
        return [self._events(gateway, index, arrived_s) for index in range(len(self.prompts))]

    async def _events(self, gateway: Gateway, index: int, arrived_s: float) -> AsyncGenerator[GatewayEvent, None]:
        """The deadline counts from the arrival of the request, however long this prompt waited for others."""
        headers, unique = self.headers, self.headers.name.unique
        waited_s = time.monotonic() - arrived_s
        events = gateway.generate(
            self.prompts[index],
            self.sampling,
            slo=headers.slo,
            request_id=f"{unique}.{index}" if len(self.prompts) > 1 else unique,
            client_id=headers.name.given,
            deadline_s=None if headers.deadline_s is None else headers.deadline_s - waited_s,
            session=headers.session,
            model=self.model,
            tenant=headers.tenant,
        )
        async with aclosing(events):
            async for event in events:
                yield scores_of(event) if self.scores_only else event


class Reply(Response):
    """Runs the request while the response is sent. Owned by its connection.

    `encoder_slots`: shared by all replies; each thread that encodes takes GIL time from the event loop.
    """

    def __init__(
        self, gateway: Gateway, request: ParsedRequest, form: Format, model: str, encoder_slots: asyncio.Semaphore
    ) -> None:
        super().__init__()
        self._encoder_slots = encoder_slots
        self._gateway = gateway
        self._request = request
        self._format = form
        self._begun = False
        self._fields = {
            "id": f"{form.prefix}-{request.headers.name.unique}",
            "object": form.chunk_kind if request.stream else form.whole_kind,
            "created": int(time.time()),
            "model": model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(merged(self._request.events(self._gateway))) as events:
                await (self._stream(events, send) if self._request.stream else self._whole(events, send))
        except Exception as error:
            ready, name = servable(self._gateway.view), self._request.headers.name
            failure = failure_of(error, ready, name.unique, self._request.client_names)
            if not self._begun:
                await failure.response()(scope, receive, send)
                return
            scope[OUTCOME].status = failure.status
            await _send_body(send, b"event: error\ndata: " + failure.body + b"\n\n", last=True)

    async def _whole(self, events: AsyncGenerator[tuple[int, GatewayEvent], None], send: Send) -> None:
        accepted: Accepted | None = None
        deltas: defaultdict[int, list[TextDelta]] = defaultdict(list)
        ends: dict[int, Completed] = {}
        usage = Usage()
        async for prompt, event in events:
            match event:
                case Accepted():
                    accepted = accepted or event
                case TextDelta():
                    deltas[self._choice(prompt, event.index)].append(event)
                case Completed():
                    ends[prompt] = event
                    usage.add(event)
        assert accepted is not None, "a completed request was accepted"
        answers = [
            (choice, TextDelta.join(deltas.pop(choice, ())), finish)
            for prompt, end in sorted(ends.items())
            for choice, finish in ((self._choice(prompt, index), finish) for index, finish in enumerate(finishes(end)))
        ]
        in_thread = any(_is_long(delta) for _, delta, _ in answers)  # then all: they may repeat one prompt's logprobs
        choices = []
        for answer in answers:
            choices.append(await self._encoded(partial(self._format.whole, *answer), in_thread))
            await asyncio.sleep(0)  # many short ones together take long, too
        body = msgspec.json.encode(self._fields | {"choices": choices, "usage": usage.json})
        await self._begin(accepted, {"content-type": JSON, "content-length": str(len(body))}, send)
        await _send_body(send, body, last=True)

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
                    counts = self._counts(so_far)
                    # A delta may have no text: its tokens end inside a character or a possible stop string.
                    if event.text or event.logprobs or event.prompt_logprobs or counts:
                        part = partial(self._format.part, self._choice(prompt, event.index), event)
                        choices = [await self._encoded(part, _is_long(event))]
                        await _send_body(send, self._chunk(choices, counts))
                case TextEnd():
                    end = partial(self._format.end, self._choice(prompt, event.index), event.finish)
                    choices = [await self._encoded(end, in_thread=False)]
                    await _send_body(send, self._chunk(choices, self._counts(so_far)))
                case Completed():
                    usage.add(event)
        last = self._chunk([], usage.json) if self._request.include_usage else b""
        await _send_body(send, last + b"data: [DONE]\n\n", last=True)

    async def _encoded(self, build: Callable[[], Choice], in_thread: bool) -> msgspec.Raw:
        """A choice as JSON. Encodes long ones in a thread, so that they do not delay other requests' tokens."""

        def encoded() -> msgspec.Raw:
            return msgspec.Raw(msgspec.json.encode(build()))

        if not in_thread:
            return encoded()
        async with self._encoder_slots:
            return await asyncio.to_thread(encoded)

    def _counts(self, so_far: Usage) -> dict[str, Any] | None:
        return so_far.json if self._request.usage_in_chunks else None

    def _choice(self, prompt: int, index: int) -> int:
        return prompt * self._request.sampling.n + index

    def _chunk(self, choices: list[msgspec.Raw], usage: dict[str, Any] | None = None) -> bytes:
        chunk = self._fields | {"choices": choices}
        if self._request.include_usage:
            chunk["usage"] = usage
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    async def _begin(self, accepted: Accepted, headers: dict[str, str], send: Send) -> None:
        headers |= {"cache-control": "no-store"}
        for name, predicted_s in (("ttft", accepted.predicted_ttft_s), ("tpot", accepted.predicted_tpot_s)):
            if predicted_s is not None:
                headers[f"x-diptych-predicted-{name}-ms"] = f"{1000 * predicted_s:.3f}"
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": pairs})


def scores_of(event: GatewayEvent) -> GatewayEvent:
    """The event without the generated token: the prompt's logprobs, and an empty answer."""
    match event:
        case TextDelta():
            return TextDelta("", (), 0, prompt_logprobs=event.prompt_logprobs, index=event.index)
        case TextEnd():
            return replace(event, finish=FinishReason.LENGTH)
        case Completed():
            answers = tuple(replace(each, finish=FinishReason.LENGTH) for each in event.answers)
            return replace(event, finish=FinishReason.LENGTH, completion_tokens=0, answers=answers)
    return event


async def merged(
    streams: Sequence[AsyncGenerator[GatewayEvent, None]],
) -> AsyncGenerator[tuple[int, GatewayEvent], None]:
    """(index, event) of all streams as events arrive. At most `MAX_CONCURRENT_PROMPTS` run at once, started in order.

    The first error, or closing the iterator, ends all of them.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, GatewayEvent] | Exception | None] = asyncio.Queue(1)
    slots = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

    async def follow(index: int, stream: AsyncGenerator[GatewayEvent, None]) -> None:
        try:
            async with slots, aclosing(stream) as events:
                async for event in events:
                    await queue.put((index, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    following = [asyncio.create_task(follow(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(following)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in following:
            task.cancel()
        await asyncio.wait(following)


def _is_long(delta: TextDelta) -> bool:
    return sum(1 + len(each.top) for each in (*delta.logprobs, *delta.prompt_logprobs)) > MAX_LOGPROBS


async def _send_body(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
