"""One request's response, from the gateway's events to HTTP: whole, or as server-sent events.

The response begins once workers are chosen, so its headers have the predictions. A request that fails before that gets
an error status, one that fails later an `error` event. A client that disconnects cancels it wherever it waits.
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
from cluster.frontend.http.middleware import ENDING
from cluster.frontend.http.terms import Terms
from cluster.frontend.text import GatewayEvent, GenerationInput, TextDelta, TextEnd
from workers.request import FinishReason, SamplingParams

EVENTS = "text/event-stream; charset=utf-8"
MOST_LOGPROBS = 512  # that are encoded in the event loop: 6 ms, measured
MOST_AT_ONCE = 64  # prompts of one request; the others wait here and take no place in the gateway


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request. Answer i to prompt p is choice p * n + i."""

    prompts: Sequence[GenerationInput]
    sampling: SamplingParams
    terms: Terms
    model: str
    sent: Mapping[str, str]  # as `Body.sent`
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
    """Runs the request while the response is sent. Owned by its connection.

    `encoding` lets one reply at a time encode in a thread: each further one would take GIL time from the event loop.
    """

    def __init__(
        self, gateway: Gateway, request: ParsedRequest, form: Format, model: str, encoding: asyncio.Semaphore
    ) -> None:
        super().__init__()
        self._encoding = encoding
        self._gateway = gateway
        self._request = request
        self._format = form
        self._begun = False
        self._fields = {
            "id": f"{form.prefix}-{request.terms.name.unique}",
            "object": form.chunk_kind if request.stream else form.whole_kind,
            "created": int(time.time()),
            "model": model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(together(self._request.events(self._gateway))) as events:
                await (self._stream(events, send) if self._request.stream else self._whole(events, send))
        except Exception as error:
            ready, name = servable(self._gateway.view), self._request.terms.name
            failure = failure_of(error, ready, name.unique, self._request.sent)
            if not self._begun:
                await failure.response()(scope, receive, send)
                return
            scope[ENDING].status = failure.status
            await _more(send, b"event: error\ndata: " + failure.body + b"\n\n", last=True)

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
            await asyncio.sleep(0)  # many short ones take long, too
        body = msgspec.json.encode(self._fields | {"choices": choices, "usage": usage.json})
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
                    counts = self._counts(so_far)
                    # A delta may have no text yet: half a character, or what may become a stop string.
                    if event.text or event.logprobs or event.prompt_logprobs or counts:
                        part = partial(self._format.part, self._choice(prompt, event.index), event)
                        choices = [await self._encoded(part, _is_long(event))]
                        await _more(send, self._chunk(choices, counts))
                case TextEnd():
                    end = partial(self._format.end, self._choice(prompt, event.index), event.finish)
                    choices = [await self._encoded(end, in_thread=False)]
                    await _more(send, self._chunk(choices, self._counts(so_far)))
                case Completed():
                    usage.add(event)
        last = self._chunk([], usage.json) if self._request.include_usage else b""
        await _more(send, last + b"data: [DONE]\n\n", last=True)

    async def _encoded(self, build: Callable[[], Choice], in_thread: bool) -> msgspec.Raw:
        """A choice as JSON; a long one in a thread, so that other requests' tokens are not late."""

        def encoded() -> msgspec.Raw:
            return msgspec.Raw(msgspec.json.encode(build()))

        if not in_thread:
            return encoded()
        async with self._encoding:
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
    """Without the generated token: the prompt's logprobs, and an empty answer."""
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
    """(index, event) of all streams as they come. At most `MOST_AT_ONCE` run, started in order.

    The first error ends them all, and so does closing the iterator.
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
    return sum(1 + len(each.top) for each in (*delta.logprobs, *delta.prompt_logprobs)) > MOST_LOGPROBS


async def _more(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
