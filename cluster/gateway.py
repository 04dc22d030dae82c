"""Text over a dispatcher: checks a request, turns text to tokens and tokens to text, ends it at stop strings.

Knows the served model and the latest view of the cluster; knows no wire format and no worker.

ClusterError (`cluster.events`)
├── UnknownModel        this cluster serves another model
├── DuplicateRequest    a request of this id is running here
└── RequestCancelled    `Gateway.cancel` ended it
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from cluster.events import Accepted, ClusterError, Completed, Delta, Event, Rejected, Unservable
from cluster.serving import GatewayContext
from cluster.spec import Role
from cluster.text import GenerationInput, TextDelta, TextEvent, TextStream, Tokenizer
from cluster.view import ClusterView
from workers.errors import InvalidRequest
from workers.request import SLO, FinishReason, Request, SamplingParams

THREAD_ABOVE_BYTES = 4096  # about a millisecond of tokenising; longer prompts must not hold up the others' tokens
LONGEST_STOP = 1024  # characters; looking for a held-back beginning costs the square of it
LONGEST_ID = 128
RETRY_AFTER_S = 1.0


class UnknownModel(ClusterError):
    """The caller asked for a model that is not served here."""


class DuplicateRequest(ClusterError):
    """The id is taken by a running request."""


class RequestCancelled(ClusterError):
    """Ended by its caller, through `Gateway.cancel`."""


class Gateway:
    """One gateway's requests. Owned by its door."""

    def __init__(self, context: GatewayContext, tokenizer: Tokenizer) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self._active: dict[str, _Running] = {}

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def view(self) -> ClusterView:
        return self._context.dispatcher.view

    async def generate(
        self,
        prompt: GenerationInput,
        sampling: SamplingParams,
        *,
        slo: SLO | None = None,
        request_id: str = "",
        deadline_s: float | None = None,
        session: str = "",
        model: str = "",
    ) -> AsyncGenerator[TextEvent, None]:
        """Accepted, text deltas, Completed; neighbouring deltas that the caller did not fetch in time come as one.

        `deadline_s` counts from now. Closing the iterator cancels the request on its workers. Errors:
        `cluster.events`, `InvalidRequest`, and those above.
        """
        arrived_ns = time.monotonic_ns()
        self._check_model(model)
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        running = self._enter(request_id)
        try:
            tokens = await self._encode(prompt)
            sampling = self._resolve(sampling, len(tokens))
            request = Request(request_id, tokens, sampling, slo or SLO(), session=session)
            running.pump = asyncio.create_task(self._pump(request, running.outbox, arrived_ns, deadline_s))
            while (event := await running.outbox.take()) is not None:
                yield event
        finally:
            await running.close()
            del self._active[request_id]

    def cancel(self, request_id: str) -> bool:
        """End a request at once; its iterator raises `RequestCancelled`. False: no such request runs here."""
        running = self._active.get(request_id)
        if running is None:
            return False
        running.cancel(RequestCancelled(f"request {request_id} was cancelled by its caller"))
        return True

    async def close(self) -> None:
        """Cut what still runs; returns when the dispatcher has let go of all of it."""
        running = list(self._active.values())
        for each in running:
            each.cancel(RequestCancelled("the gateway was closed"))
        await asyncio.gather(*(each.close() for each in running))

    def _check_model(self, model: str) -> None:
        served = self._context.model.name
        if model not in ("", served):
            raise UnknownModel(f"model {model!r} is not served here; leave it empty or ask for {served!r}")

    def _enter(self, request_id: str) -> "_Running":
        if len(request_id) > LONGEST_ID or not all(" " < letter <= "~" and letter != "/" for letter in request_id):
            rule = f"must be at most {LONGEST_ID} visible ASCII characters without '/'"
            raise InvalidRequest("request_id", f"{request_id[:40]!r} cannot be used; it {rule}")
        if request_id in self._active:
            raise DuplicateRequest(f"request {request_id} is running already; choose another id or leave it empty")
        most = self._context.spec.gateway.max_requests
        if len(self._active) >= most:
            raise Rejected(f"{most} requests are in flight, as many as this gateway takes; try again", RETRY_AFTER_S)
        running = self._active[request_id] = _Running()
        return running

    async def _encode(self, prompt: GenerationInput) -> tuple[int, ...]:
        most = self._context.spec.gateway.max_prompt_bytes
        num_bytes = prompt.num_bytes
        if num_bytes > most:
            raise InvalidRequest("prompt", f"has {num_bytes} bytes; this gateway takes at most {most}")
        if num_bytes > THREAD_ABOVE_BYTES:
            tokens = await asyncio.to_thread(prompt.encode, self._tokenizer)
        else:
            tokens = prompt.encode(self._tokenizer)
        if not tokens:
            raise InvalidRequest("prompt", "encodes to no token at all; give more text")
        self._check_vocabulary("prompt.tokens", tokens)
        return tokens

    def _check_vocabulary(self, field: str, tokens: tuple[int, ...]) -> None:
        size = self._context.model.vocab_size
        if tokens and (max(tokens) >= size or min(tokens) < 0):
            index = next(index for index, token in enumerate(tokens) if not 0 <= token < size)
            raise InvalidRequest(f"{field}[{index}]", f"is {tokens[index]}; this model's token ids end at {size - 1}")

    def _resolve(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """What the caller left open, decided: the seed, and max_tokens as far as the answer fits."""
        self._check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids)
        if any(len(stop) > LONGEST_STOP for stop in sampling.stop):
            raise InvalidRequest("sampling.stop", f"has a string of more than {LONGEST_STOP} characters; shorten it")
        room = self._room(num_prompt)
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = max(sampling.min_tokens, min(room, self._context.spec.gateway.default_max_tokens))
        if max_tokens > room:
            rule = f"at most {room} output tokens fit behind a prompt of {num_prompt}"
            raise InvalidRequest("sampling.max_tokens", f"is {max_tokens}, but {rule}")
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        return replace(sampling, max_tokens=max_tokens, seed=seed)

    def _room(self, num_prompt: int) -> int:
        """How many output tokens fit behind the prompt: in the model's context and in the decode pools."""
        context = self._context.model.context_length
        if num_prompt >= context:
            raise InvalidRequest(
                "prompt", f"has {num_prompt} tokens; the model's context of {context} must hold them and an answer"
            )
        room = context - num_prompt
        for role, reserve in ((Role.PREFILL, 0), (Role.DECODE, 1)):
            longest = _longest_sequence(self.view, role)
            if longest is None:
                continue
            if num_prompt + reserve > longest:
                pools = f"the {role.value} pools here hold sequences of at most {longest}"
                raise Unservable(f"the prompt has {num_prompt} tokens; {pools} (with the answer); shorten it")
            if role is Role.DECODE:
                room = min(room, longest - num_prompt)
        return room

    async def _pump(self, request: Request, outbox: "Outbox", arrived_ns: int, deadline_s: float | None) -> None:
        """Move events from the dispatcher to the outbox, as fast as they come; the door fetches at its own pace."""
        text = TextStream(self._tokenizer.detokenizer(), request.sampling)
        try:
            left_s = None if deadline_s is None else deadline_s - (time.monotonic_ns() - arrived_ns) / 1e9
            running = self._context.dispatcher.generate(request, deadline_s=left_s, arrived_ns=arrived_ns)
            async with aclosing(running) as events:
                async for event in events:
                    self._pass_on(event, text, outbox, request.id)
            outbox.end()
        except Exception as error:  # the outbox raises it in the door's task
            outbox.fail(error)

    def _pass_on(self, event: Event, text: TextStream, outbox: "Outbox", request_id: str) -> None:
        match event:
            case Accepted():
                outbox.put(event)
            case Delta():
                delta = text.push(event)
                if delta is not None:
                    outbox.put(delta)
                    if text.stopped:
                        self._context.dispatcher.finish(request_id)
            case Completed():
                rest = text.flush()
                if rest is not None:
                    outbox.put(rest)
                if text.stopped:  # the last tokens may have been on their way when `finish` was called
                    event = replace(event, finish=FinishReason.STOP, completion_tokens=text.num_tokens)
                outbox.put(event)


class _Running:
    """A request from its admission to the end of its iterator, which owns it."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.pump: asyncio.Task[None] | None = None  # none while the prompt is being encoded

    def cancel(self, reason: Exception) -> None:
        """End it now, even when the door is stuck on a client that does not read."""
        self.outbox.fail(reason)
        if self.pump is not None:
            self.pump.cancel()

    async def close(self) -> None:
        """Returns when the dispatcher has let go of the request."""
        if self.pump is not None:
            self.pump.cancel()
            await asyncio.wait([self.pump])


class Outbox:
    """Events between a request's pump and its door. `put` never waits; the door's lag shows as longer deltas.

    Bounded by the request itself: at most max_tokens tokens with their text, and one Accepted for each attempt.
    Owned by the request's `Gateway.generate`.
    """

    def __init__(self) -> None:
        self._events: deque[TextEvent] = deque()
        self._over: Exception | bool = False
        self._wake = asyncio.Event()

    def put(self, event: TextEvent) -> None:
        self._events.append(event)
        self._wake.set()

    def end(self) -> None:
        """Nothing more will come."""
        self._over = self._over or True
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """`take` raises this once it has given out what came before. The first error counts."""
        if self._over is False:
            self._over = error
        self._wake.set()

    async def take(self) -> TextEvent | None:
        """The next event, deltas joined; None at the end."""
        while not self._events:
            if isinstance(self._over, Exception):
                raise self._over
            if self._over:
                return None
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        if not isinstance(event, TextDelta) or not (self._events and isinstance(self._events[0], TextDelta)):
            return event
        deltas = [event]
        while self._events and isinstance(self._events[0], TextDelta):
            deltas.append(self._events.popleft())  # type: ignore[arg-type]
        return TextDelta.join(deltas)


def servable(view: ClusterView) -> bool:
    """Whether workers for both phases are ready."""
    return bool(view.ready(Role.MIXED) or (view.ready(Role.PREFILL) and view.ready(Role.DECODE)))


def _longest_sequence(view: ClusterView, role: Role) -> int | None:
    """The longest sequence that a worker of this role holds; None while none has told its capacity."""
    told = (worker.capacity_tokens for worker in view.workers if worker.role in (role, Role.MIXED))
    return max((tokens for tokens in told if tokens > 0), default=None)
