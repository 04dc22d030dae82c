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

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.events import Accepted, Completed
from cluster.frontend.gateway import Gateway, GenerateOptions, servable
from cluster.frontend.http.failures import JSON, failure_of
from cluster.frontend.http.middleware import OUTCOME, WRITER, BodyWriter
from cluster.frontend.http.wire import Usage, Wire
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
    options: GenerateOptions
    client_names: Mapping[str, str]  # see `Body`
    stream: bool
    scores_only: bool  # the answers themselves are dropped
    keep: Collection[int] = ()  # special tokens that have text

    def events(self, gateway: Gateway, send_delta: SendDelta | None) -> list[AsyncGenerator[GatewayEvent, None]]:
        """One iterator for each prompt; closing it cancels the prompt's request. `send_delta`: for a single prompt."""
        arrived_s = time.monotonic()
        return [self._events(gateway, index, arrived_s, send_delta) for index in range(len(self.prompts))]

    async def _events(
        self, gateway: Gateway, index: int, arrived_s: float, send_delta: SendDelta | None
    ) -> AsyncGenerator[GatewayEvent, None]:
        waited_s = time.monotonic() - arrived_s  # for other prompts
        options = of_prompt(self.options, index, len(self.prompts), waited_s)
        events = gateway.generate(self.prompts[index], self.sampling, options, send_delta=send_delta, keep=self.keep)
        async with aclosing(events):
            async for event in events:
                yield scores_of(event) if self.scores_only else event


def of_prompt(options: GenerateOptions, index: int, num_prompts: int, waited_s: float = 0.0) -> GenerateOptions:
    """Of prompt number `index`. The deadline counts from the request's arrival, `waited_s` ago."""
    request_id = f"{options.request_id}.{index}" if num_prompts > 1 else options.request_id
    left_s = None if options.deadline_s is None else options.deadline_s - waited_s
    return replace(options, request_id=request_id, deadline_s=left_s)


class Reply(Response):
    """Runs the request while the response is sent. Owned by its connection.

    `encoder_slots`: shared by all replies; each thread that encodes takes GIL time from the event loop.
    """

    def __init__(self, gateway: Gateway, request: ParsedRequest, wire: Wire, encoder_slots: asyncio.Semaphore) -> None:
        super().__init__()
        self._encoder_slots = encoder_slots
        self._gateway = gateway
        self._request = request
        self._wire = wire
        self._begun = False
        self._writer: BodyWriter | None = None
        self._sent = Usage()  # so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._writer = scope.get(WRITER)
            at_once = self._request.stream and len(self._request.prompts) == 1 and not self._request.scores_only
            iterators = self._request.events(self._gateway, self._send_delta if at_once else None)
            async with aclosing(merged(iterators)) as events:
                await (self._stream(events, send) if self._request.stream else self._whole(events, send))
        except Exception as error:
            ready, request_id = servable(self._gateway.view), self._request.options.request_id
            failure = failure_of(error, ready, request_id, self._request.client_names)
            if not self._begun:
                await failure.response(scope["path"])(scope, receive, send)
                return
            scope[OUTCOME].status = failure.status
            await _send_body(send, self._wire.failed(failure), last=True)

    async def _whole(self, events: AsyncGenerator[tuple[int, GatewayEvent], None], send: Send) -> None:
        accepted: Accepted | None = None
        deltas: defaultdict[int, list[TextDelta]] = defaultdict(list)
        ends: dict[int, TextEnd] = {}
        usage = Usage()
        async for prompt, event in events:
            match event:
                case Accepted():
                    accepted = accepted or event
                case TextDelta():
                    deltas[self._choice(prompt, event.index)].append(event)
                case TextEnd():
                    ends[self._choice(prompt, event.index)] = event
                case Completed():
                    usage.add(event)
        assert accepted is not None, "a completed request was accepted"
        answers = [(choice, TextDelta.join(deltas.pop(choice, ())), end) for choice, end in sorted(ends.items())]
        in_thread = any(_is_long(delta) for _, delta, _ in answers)  # then all: they may repeat one prompt's logprobs
        encoded = []
        for answer in answers:
            encoded.append(await self._encoded(partial(self._wire.answer, *answer), in_thread))
            await asyncio.sleep(0)  # many short ones together take long, too
        body = self._wire.document(encoded, usage)
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
                        if first := self._wire.begin(self._sent):
                            await _send_body(send, first)
                case TextDelta():
                    self._sent.completion_tokens += len(event.tokens)
                    part = partial(self._wire.part, self._choice(prompt, event.index), event, replace(self._sent))
                    if encoded := await self._encoded(part, _is_long(event)):
                        await _send_body(send, encoded)
                case TextEnd():
                    await _send_body(send, self._wire.end(self._choice(prompt, event.index), event, self._sent))
                case Completed():
                    usage.add(event)
        self._sent = usage
        await _send_body(send, self._wire.last(usage), last=True)

    def _send_delta(self, delta: TextDelta) -> bool:
        """Send a delta of the only prompt at once, if the client is ready and the delta is short."""
        if self._writer is None or not self._writer.is_ready or _is_long(delta):
            return False
        self._sent.completion_tokens += len(delta.tokens)
        if encoded := self._wire.part(delta.index, delta, self._sent):
            self._writer.write(encoded)
        return True

    async def _encoded(self, encode: Callable[[], bytes], in_thread: bool) -> bytes:
        """Encodes long parts in a thread, so that they do not delay other requests' tokens."""
        if not in_thread:
            return encode()
        async with self._encoder_slots:
            return await asyncio.to_thread(encode)

    def _choice(self, prompt: int, index: int) -> int:
        return prompt * self._request.sampling.n + index

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
