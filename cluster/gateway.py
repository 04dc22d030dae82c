"""Text over a dispatcher: checks a request, turns text to tokens and tokens to text, ends it at stop strings.

A request for several answers is as many requests to the dispatcher, which share their prompt's work:

    ask, n = 3   ──>   ask#0, its seed      ──> answer 0   ┐
                       ask#1, another seed  ──> answer 1   ├──> one stream of deltas by index, one Completed
                       ask#2, another seed  ──> answer 2   ┘

Knows the served model and the latest view of the cluster; knows no wire format and no worker.

ClusterError (`cluster.events`)
├── UnknownModel        this cluster serves another model
├── DuplicateRequest    a request of this id is running here
└── RequestCancelled    `Gateway.cancel` ended it
"""

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from cluster.events import Accepted, AnswerEnd, ClusterError, Completed, Delta, Event, Rejected, Unservable
from cluster.serving import GatewayContext
from cluster.spec import Role
from cluster.text import GenerationInput, TextDelta, TextEvent, TextStream, Tokenizer
from cluster.view import ClusterView
from workers.errors import InvalidRequest
from workers.request import SLO, FinishReason, Request, SamplingParams, TokenLogprobs

Logprobs = tuple[TokenLogprobs, ...]

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
        """Answers under way."""
        return sum(running.num_answers for running in self._active.values())

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

        Deltas of several answers interleave, told apart by `index`. With `best_of` above n all is held back until the
        best are known. `deadline_s` counts from now. Closing the iterator cancels the request on its workers. Errors:
        `cluster.events`, `InvalidRequest`, and those above.
        """
        arrived_ns = time.monotonic_ns()
        self._check_model(model)
        self._check_answers(sampling)
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        running = self._enter(request_id, sampling.num_answers)
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

    def _check_answers(self, sampling: SamplingParams) -> None:
        """More answers than can ever run at once are refused before anything is made for them."""
        spec, count = self._context.spec, sampling.num_answers
        slots = sum(
            pool.replicas * pool.engine.max_running for pool in spec.pools if pool.role in (Role.DECODE, Role.MIXED)
        )
        most = min(spec.gateway.max_requests, slots)
        if count > max(1, most):
            field = "n" if sampling.best_of is None else "best_of"
            raise InvalidRequest(f"sampling.{field}", f"is {count}; this cluster makes at most {most} answers at once")

    def _enter(self, request_id: str, num_answers: int) -> "_Running":
        if len(request_id) > LONGEST_ID or not all(" " < letter <= "~" and letter not in "/#" for letter in request_id):
            rule = f"must be at most {LONGEST_ID} visible ASCII characters without '/' and '#'"
            raise InvalidRequest("request_id", f"{request_id[:40]!r} cannot be used; it {rule}")
        if request_id in self._active:
            raise DuplicateRequest(f"request {request_id} is running already; choose another id or leave it empty")
        most = self._context.spec.gateway.max_requests
        if (active := self.active) + num_answers > most:
            room = f"{active} of {most} requests are in flight, and {num_answers} more do not fit"
            raise Rejected(f"{room} in this gateway; try again", RETRY_AFTER_S)
        running = self._active[request_id] = _Running(num_answers)
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
        self._check_vocabulary("sampling.logit_bias", tuple(token for token, _ in sampling.logit_bias))
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
        """Move events from the dispatcher to the outbox, as fast as they come; the door fetches at its own pace.

        The first answer that fails, or an end from outside, ends them all.
        """
        left_s = None if deadline_s is None else deadline_s - (time.monotonic_ns() - arrived_ns) / 1e9
        sampling = request.sampling
        ranked = sampling.num_answers > sampling.n
        answers = [
            _Answer(index, each, request.id, self._text_stream(each.sampling, index), Outbox() if ranked else outbox)
            for index, each in enumerate(siblings(request))
        ]
        try:
            async with asyncio.TaskGroup() as together:
                for answer in answers:
                    together.create_task(self._follow(answer, arrived_ns, left_s))
            best = sorted(answers, key=_Answer.by_rank)[: sampling.n] if ranked else answers
            if ranked:
                _give_out(best, answers[0].prompt_logprobs, sampling, outbox)
            outbox.put(_together(answers, best, ranked))
            outbox.end()
        except ExceptionGroup as errors:  # the outbox raises it in the door's task
            outbox.fail(errors.exceptions[0])

    def _text_stream(self, sampling: SamplingParams, index: int) -> TextStream:
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        return TextStream(detokenizer, sampling, index)

    async def _follow(self, answer: "_Answer", arrived_ns: int, deadline_s: float | None) -> None:
        running = self._context.dispatcher.generate(answer.request, deadline_s=deadline_s, arrived_ns=arrived_ns)
        async with aclosing(running) as events:
            async for event in events:
                answer.take(event)
                if answer.stopped:
                    self._context.dispatcher.finish(answer.request.id)


def siblings(request: Request) -> tuple[Request, ...]:
    """The requests of one answer each that make this one; a request for one answer is its own.

    Answer 0 has the request's own seed, so it is what a request for one answer gives.
    """
    sampling = request.sampling
    assert sampling.seed is not None, "the gateway has resolved the seed"
    if sampling.num_answers == 1:
        return (request,)
    alone = replace(sampling, n=1, best_of=None)
    if sampling.num_answers > sampling.n and sampling.logprobs is None:
        alone = replace(alone, logprobs=0)  # to rank by
    return tuple(
        replace(
            request,
            id=f"{request.id}#{index}",
            group=request.id,
            sampling=replace(
                alone,
                seed=answer_seed(sampling.seed, index),
                prompt_logprobs=None if index else sampling.prompt_logprobs,  # they are the same for all
            ),
        )
        for index in range(sampling.num_answers)
    )


def answer_seed(seed: int, index: int) -> int:
    """The seed of answer `index` to a request with this seed: a request for one answer with it gives the same."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


class _Answer:
    """One answer: its request, and what became of it. Owned by the request's pump."""

    def __init__(self, index: int, request: Request, shown_id: str, text: TextStream, outbox: "Outbox") -> None:
        self.request = request
        self.outbox = outbox
        self.end: Completed | None = None
        self.prompt_logprobs: Logprobs = ()
        self._index = index
        self._shown_id = shown_id
        self._text = text
        self._logprob = 0.0

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def mean_logprob(self) -> float:
        return self._logprob / max(1, self._text.num_tokens)

    def by_rank(self) -> tuple[float, int]:
        """Sorts the likeliest answer first; of equal ones, the first."""
        return -self.mean_logprob, self._index

    def take(self, event: Event) -> None:
        match event:
            case Accepted():
                self.outbox.put(replace(event, request_id=self._shown_id, index=self._index))
            case Delta():
                delta = self._text.push(event)
                if delta is not None:
                    self._logprob += sum(each.chosen for each in delta.logprobs)
                    self.prompt_logprobs += delta.prompt_logprobs
                    self.outbox.put(delta)
            case Completed():
                rest = self._text.flush()
                if rest is not None:
                    self.outbox.put(rest)
                if self.stopped:  # the last tokens may have been on their way when `finish` was called
                    event = replace(event, finish=FinishReason.STOP, completion_tokens=self._text.num_tokens)
                self.end = event


def _give_out(best: Sequence[_Answer], prompt_logprobs: Logprobs, sampling: SamplingParams, outbox: "Outbox") -> None:
    """What the best answers held back, under their rank."""
    if prompt_logprobs:
        outbox.put(TextDelta("", (), 0, prompt_logprobs=prompt_logprobs))
    for rank, answer in enumerate(best):
        for event in answer.outbox.clear():
            if isinstance(event, TextDelta):
                shown = event.logprobs if sampling.logprobs is not None else ()
                event = replace(event, index=rank, logprobs=shown, prompt_logprobs=())
            elif isinstance(event, Accepted):
                event = replace(event, index=rank)
            outbox.put(event)


def _together(made: Sequence[_Answer], best: Sequence[_Answer], ranked: bool) -> Completed:
    """The end of the request, from the ends of all its answers."""
    ends = [answer.end for answer in made if answer.end is not None]
    assert len(ends) == len(made), "every answer of a request that did not fail has an end"
    if len(made) == 1:
        return ends[0]
    answers = tuple(
        AnswerEnd(each.finish, each.completion_tokens, each.attempts, each.ledger, mean)
        for each, mean in ((answer.end, answer.mean_logprob if ranked else None) for answer in best)
        if each is not None
    )
    return Completed(
        finish=answers[0].finish,
        prompt_tokens=ends[0].prompt_tokens,
        completion_tokens=sum(each.completion_tokens for each in ends),
        cached_tokens=min(each.cached_tokens for each in ends),
        attempts=max(each.attempts for each in ends),
        ledger=max((each.ledger for each in ends), key=lambda ledger: ledger.total_ns),
        transfers=tuple(report for each in ends for report in each.transfers),
        answers=answers,
    )


class _Running:
    """A request from its admission to the end of its iterator, which owns it."""

    def __init__(self, num_answers: int) -> None:
        self.num_answers = num_answers
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
        return self._joined(event)

    def _joined(self, first: TextDelta) -> TextDelta:
        """`first` with the deltas of its answer among those that follow it, up to the next event of another kind."""
        mine: list[TextDelta] = [first]
        others: list[TextDelta] = []
        while self._events and isinstance(self._events[0], TextDelta):
            delta = self._events.popleft()
            assert isinstance(delta, TextDelta)
            (mine if delta.index == first.index else others).append(delta)
        self._events.extendleft(reversed(others))
        return TextDelta.join(mine)

    def clear(self) -> list[TextEvent]:
        """All that is in it, as it came."""
        events = list(self._events)
        self._events.clear()
        return events


def servable(view: ClusterView) -> bool:
    """Whether workers for both phases are ready."""
    return bool(view.ready(Role.MIXED) or (view.ready(Role.PREFILL) and view.ready(Role.DECODE)))


def _longest_sequence(view: ClusterView, role: Role) -> int | None:
    """The longest sequence that a worker of this role holds; None while none has told its capacity."""
    told = (worker.capacity_tokens for worker in view.workers if worker.role in (role, Role.MIXED))
    return max((tokens for tokens in told if tokens > 0), default=None)
