"""The HTTP response to one request: a JSON body, or server-sent events.

The response starts once workers are chosen, so its headers have the predictions. A request that fails earlier gets an
error status; one that fails later gets an `error` event. A client that disconnects cancels its request.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.events import Accepted, Completed
from cluster.frontend.gateway import Gateway, servable
from cluster.frontend.http.failures import JSON, failure_of
from cluster.frontend.http.formats import Choice, Format, Usage, finishes
from cluster.frontend.http.headers import RequestHeaders
from cluster.frontend.http.middleware import OUTCOME, WRITER, BodyWriter
from cluster.frontend.output_collector import SendDelta
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
    keep: Collection[int] = ()  # special tokens that have text

    def events(self, gateway: Gateway, send_delta: SendDelta | None) -> list[AsyncGenerator[GatewayEvent, None]]:
        """One iterator for each prompt; closing it cancels the prompt's request. `send_delta`: for a single prompt."""
        arrived_s = time.monotonic()
        return [self._events(gateway, index, arrived_s, send_delta) for index in range(len(self.prompts))]

    async def _events(
        self, gateway: Gateway, index: int, arrived_s: float, send_delta: SendDelta | None
    ) -> AsyncGenerator[GatewayEvent, None]:
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
            send_delta=send_delta,
            keep=self.keep,
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
        self._writer: BodyWriter | None = None
        self._sent = Usage()  # so far
        self._fields = {
            "id": f"{form.prefix}-{request.headers.name.unique}",
            "object": form.chunk_kind if request.stream else form.whole_kind,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + msgspec.json.encode(self._fields)[:-1] + b',"choices":['

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._writer = scope.get(WRITER)
            at_once = self._request.stream and len(self._request.prompts) == 1 and not self._request.scores_only
            iterators = self._request.events(self._gateway, self._send_delta if at_once else None)
            async with aclosing(merged(iterators)) as events:
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
            choices.append(msgspec.Raw(await self._encoded(partial(self._format.whole, *answer), in_thread)))
            await asyncio.sleep(0)  # many short ones together take long, too
        body = msgspec.json.encode(self._fields | {"choices": choices, "usage": usage.json})
        await self._begin(accepted, {"content-type": JSON, "content-length": str(len(body))}, send)
        await _send_body(send, body, last=True)

    async def _stream(self, events: AsyncGenerator[tuple[int, GatewayEvent], None], send: Send) -> None:
        usage = Usage()
        prompts: dict[int, int] = {}
        async for prompt, event in events:
            match event:
                case Accepted():
                    prompts[prompt] = event.prompt_tokens
                    self._sent.prompt_tokens = sum(prompts.values())
                    if not self._begun:
                        await self._begin(event, {"content-type": EVENTS, "x-accel-buffering": "no"}, send)
                case TextDelta():
                    if self._count(event):
                        part = partial(self._part, self._choice(prompt, event.index), event)
                        if choice := await self._encoded(part, _is_long(event)):
                            await _send_body(send, self._chunk(choice))
                case TextEnd():
                    end = partial(self._format.end, self._choice(prompt, event.index), event.finish)
                    await _send_body(send, self._chunk(await self._encoded(end, in_thread=False)))
                case Completed():
                    usage.add(event)
        self._sent = usage
        last = self._chunk(b"", with_usage=True) if self._request.include_usage else b""
        await _send_body(send, last + b"data: [DONE]\n\n", last=True)

    def _send_delta(self, delta: TextDelta) -> bool:
        """Send a delta of the only prompt at once, if the client is ready and the delta is short."""
        if self._writer is None or not self._writer.is_ready or _is_long(delta):
            return False
        if self._count(delta) and (choice := self._part(delta.index, delta)) is not None:
            self._writer.write(self._chunk(msgspec.json.encode(choice)))
        return True

    def _part(self, choice: int, delta: TextDelta) -> Choice | None:
        part = self._format.part(choice, delta)
        if part is None and self._request.usage_in_chunks:
            return {"index": choice, "delta": {}, "logprobs": None, "finish_reason": None}
        return part

    def _count(self, delta: TextDelta) -> bool:
        """Count its tokens. Returns whether there is something to send.

        Tokens that end inside a character or a possible stop string have no text.
        """
        self._sent.completion_tokens += len(delta.tokens)
        return bool(delta.text or delta.logprobs or delta.prompt_logprobs or self._request.usage_in_chunks)

    async def _encoded(self, build: Callable[[], Choice | None], in_thread: bool) -> bytes:
        """A choice as JSON; empty without one. Encodes long ones in a thread, so that they do not delay other
        requests' tokens.
        """

        def encoded() -> bytes:
            choice = build()
            return b"" if choice is None else msgspec.json.encode(choice)

        if not in_thread:
            return encoded()
        async with self._encoder_slots:
            return await asyncio.to_thread(encoded)

    def _choice(self, prompt: int, index: int) -> int:
        return prompt * self._request.sampling.n + index

    def _chunk(self, choice: bytes, *, with_usage: bool = False) -> bytes:
        """An event with this choice, or with none."""
        if not self._request.include_usage:
            return self._head + choice + b"]}\n\n"
        counted = with_usage or self._request.usage_in_chunks
        usage = msgspec.json.encode(self._sent.json if counted else None)
        return self._head + choice + b'],"usage":' + usage + b"}\n\n"

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
    if not delta.logprobs and not delta.prompt_logprobs:
        return False
    return sum(1 + len(each.top) for each in (*delta.logprobs, *delta.prompt_logprobs)) > MAX_LOGPROBS


async def _send_body(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
