"""Text over a dispatcher: checks a request, turns text to tokens and tokens to text, ends it at stop strings.

A request for several answers is as many requests to the dispatcher, which share their prompt's work:

    ask, n = 3   ──>   ask#0, its seed      ──> answer 0   ┐
                       ask#1, another seed  ──> answer 1   ├──> one stream of deltas by index, one Completed
                       ask#2, another seed  ──> answer 2   ┘

Knows the served model and the latest view of the cluster; knows no wire format and no worker.

ClusterError (`cluster.events`)
├── UnknownModel        this cluster serves another model
├── DuplicateRequest    a request of this id is running here
├── RequestCancelled    `Gateway.cancel` ended it
└── GatewayClosed       `Gateway.close` cut it
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from cluster.events import ClusterError, Event, Rejected, Unservable
from cluster.frontend.context import GatewayContext
from cluster.frontend.output_collector import RequestOutputCollector
from cluster.frontend.parallel_sampling import ChildRequest, child_requests, give_out, one_end
from cluster.frontend.preprocessing import LARGE_BYTES, Here, Preprocessing
from cluster.frontend.text import (
    EncodedPrompt,
    GatewayEvent,
    GenerationInput,
    PromptBounds,
    TextStream,
    Tokenizer,
    TokenPrompt,
    encode_apart,
    encode_prompt,
)
from cluster.observe.ledger import now_ns
from cluster.observe.metrics.responses import Responses
from cluster.spec import ClusterSpec, Role
from diptych.request_ids import LONGEST_ID, is_usable, made_id
from diptych.view import ClusterView, WorkerState
from workers.errors import InvalidRequest
from workers.request import SLO, Request, SamplingParams

LONGEST_STOP = 1024  # characters; looking for a held-back beginning costs the square of it
RETRY_AFTER_S = 1.0


class UnknownModel(ClusterError):
    """The caller asked for a model that is not served here."""


class DuplicateRequest(ClusterError):
    """The id is taken by a running request."""


class RequestCancelled(ClusterError):
    """Ended by its caller, through `Gateway.cancel`."""


class GatewayClosed(ClusterError):
    """The gateway went away under a request."""


class Gateway:
    """One gateway's requests. Owned by its server. Owns `preprocessing`, which reads large inputs; None: a thread."""

    def __init__(
        self, context: GatewayContext, tokenizer: Tokenizer, preprocessing: Preprocessing | None = None
    ) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self.preprocessing = preprocessing or Here(tokenizer)
        self._active: dict[str, _Running] = {}
        self.responses = Responses()

    @property
    def active(self) -> int:
        """Answers under way."""
        return sum(running.num_answers for running in self._active.values())

    @property
    def traces(self) -> bool:
        """Whether spans are wanted: then a server gives `cluster.observe.trace_context` the headers of each request."""
        return self._context.spec.tracing.otlp_endpoint is not None

    @property
    def view(self) -> ClusterView:
        return self._context.dispatcher.view

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def default_sampling(self) -> dict[str, Any]:
        """What the model's makers recommend, by the names of `SamplingParams`: where a request says nothing."""
        return dict(self._context.model.default_sampling)

    async def generate(
        self,
        prompt: GenerationInput,
        sampling: SamplingParams,
        *,
        slo: SLO | None = None,
        request_id: str = "",
        called: str = "",
        deadline_s: float | None = None,
        session: str = "",
        model: str = "",
        tenant: str = "",
    ) -> AsyncGenerator[GatewayEvent, None]:
        """Accepted, text deltas, each answer's end, Completed; neighbouring deltas not fetched in time come as one.

        Deltas of several answers interleave; `index` says whose they are. With `best_of` above n nothing comes
        until the best are known. `called`: a name that `cancel` knows it by as well; several may share one.
        `deadline_s` counts from now. Closing the iterator cancels the request on its workers.
        Errors: `cluster.events`, `InvalidRequest`, and those above.
        """
        arrived_ns = now_ns()
        self.check_model(model)
        self._check_answers(sampling)
        request_id = request_id or made_id()
        slo = slo or SLO()
        self._check_tenant(tenant)
        running = self._enter(request_id, called, sampling.num_answers, slo)
        try:
            tokens = await self.encode(prompt, sampling.max_tokens or 1)
            sampling = self._resolve(sampling, len(tokens))
            shares = self._context.spec.gateway.share_prefixes
            request = Request(request_id, tokens, sampling, slo, session=session, tenant=tenant, shares_prefixes=shares)
            running.pump = asyncio.create_task(self._pump(request, running.output, arrived_ns, deadline_s))
            while (event := await running.output.take()) is not None:
                yield event
        finally:
            try:
                await running.close()
            finally:  # a request cancelled here also releases its place
                del self._active[request_id]

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that any request may have: the model's context, and what pools hold."""
        by_role = (_longest_sequence(self.view, role) for role in (Role.PREFILL, Role.DECODE))
        return min([self._context.model.context_length, *(longest for longest in by_role if longest is not None)])

    def check_model(self, model: str) -> None:
        """Raises `UnknownModel` for any but the served one; empty is whichever is served."""
        served = self._context.model.name
        if model not in ("", served):
            raise UnknownModel(f"model {model!r} is not served here; leave it empty or ask for {served!r}")

    @property
    def bounds(self) -> PromptBounds:
        """Of prompts, as of now."""
        model, most_bytes = self._context.model, self._context.spec.gateway.max_prompt_bytes
        return PromptBounds(most_bytes, model.context_length, model.vocab_size, self.max_model_len)

    async def encode(self, prompt: GenerationInput, num_output: int = 1) -> tuple[int, ...]:
        """A prompt's token ids; a large one's beside the event loop. Raises `InvalidRequest`.

        Raises `Unservable` for what the model's context cannot hold, whose message says `num_output`, too.
        """
        if isinstance(prompt, EncodedPrompt):
            encoded = prompt
        elif isinstance(prompt, TokenPrompt) or prompt.num_bytes <= LARGE_BYTES:
            return encode_prompt(self._tokenizer, prompt, self.bounds)
        else:
            encoded = await self.preprocessing.call(prompt.num_bytes, encode_apart, prompt, self.bounds)
        if encoded.num_tokens > self.bounds.context_length:
            self._longest(encoded.num_tokens, num_output)
        return encoded.tokens

    def cancel(self, request_id: str) -> bool:
        """End the request of this id at once, or all that are called so; their iterators raise `RequestCancelled`.

        False: no such request runs here.
        """
        meant = [each for each in self._active.items() if request_id in (each[0], each[1].called or each[0])]
        for known, running in meant:
            running.cancel(RequestCancelled(f"request {known} was cancelled by its caller"))
        return bool(meant)

    async def close(self) -> None:
        """Cut what still runs; returns when the dispatcher has let go of all of it."""
        running = list(self._active.values())
        for each in running:
            each.cancel(GatewayClosed("the gateway was closed; ask again, of this one or another"))
        await self.preprocessing.aclose()
        await asyncio.gather(*(each.close() for each in running))

    def _check_answers(self, sampling: SamplingParams) -> None:
        """More answers than can ever run at once are refused before anything is made for them."""
        spec, count = self._context.spec, sampling.num_answers
        slots = _decode_slots(spec, self.view)
        most = min(spec.gateway.max_requests, slots)
        if count > max(1, most):
            field = "n" if sampling.best_of is None else "best_of"
            raise InvalidRequest(f"sampling.{field}", f"is {count}; this cluster makes at most {most} answers at once")

    def _check_tenant(self, tenant: str) -> None:
        if len(tenant) > LONGEST_ID or not all(" " < letter <= "~" for letter in tenant):
            rule = f"must be at most {LONGEST_ID} visible ASCII characters"
            raise InvalidRequest("tenant", f"{tenant[:40]!r} cannot be used; it {rule}")

    def _enter(self, request_id: str, called: str, num_answers: int, slo: SLO) -> "_Running":
        if len(request_id) > LONGEST_ID or not all(map(is_usable, request_id)):
            rule = f"must be at most {LONGEST_ID} visible ASCII characters without '/' and '#'"
            raise InvalidRequest("request_id", f"{request_id[:40]!r} cannot be used; it {rule}")
        if request_id in self._active:
            raise DuplicateRequest(f"request {request_id} is running already; choose another id or leave it empty")
        most = self._context.spec.gateway.max_requests
        if (active := self.active) + num_answers > most:
            self._context.dispatcher.count_refusal(slo.class_name, "gateway-full")
            room = f"{active} of {most} requests are in flight, and {num_answers} more do not fit"
            raise Rejected(f"{room} in this gateway; try again", RETRY_AFTER_S, "gateway-full")
        running = self._active[request_id] = _Running(called, num_answers)
        return running

    def _resolve(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """What the caller left open, decided: the seed, and max_tokens as far as the answer fits."""
        self.bounds.check_tokens("sampling.stop_token_ids", sampling.stop_token_ids)
        self.bounds.check_tokens("sampling.logit_bias", tuple(token for token, _ in sampling.logit_bias))
        if any(len(stop) > LONGEST_STOP for stop in sampling.stop):
            raise InvalidRequest("sampling.stop", f"has a string of more than {LONGEST_STOP} characters; shorten it")
        max_tokens = sampling.max_tokens
        limit, why = self._longest(num_prompt, max_tokens or 1)
        room = limit - num_prompt
        if max_tokens is None:
            max_tokens = max(sampling.min_tokens, min(room, self._context.spec.gateway.default_max_tokens))
        if max_tokens > room:
            name = "min_tokens" if sampling.max_tokens is None else "max_tokens"
            raise _too_long(limit, why, num_prompt, max_tokens, f"sampling.{name}")
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        return replace(sampling, max_tokens=max_tokens, seed=seed)

    def _longest(self, num_prompt: int, num_output: int) -> tuple[int, str]:
        """The most tokens of a prompt and its answer, by the model's context and the pools, and why if by these.

        Raises `Unservable` where the prompt leaves no room for an answer of one token.
        """
        limit, why = self._context.model.context_length, ""
        for role, reserve in ((Role.PREFILL, 0), (Role.DECODE, 1)):
            longest = _longest_sequence(self.view, role)
            if longest is None:
                continue
            held = f" (as many as the {role.value} pools here can hold)"
            if num_prompt + reserve > longest:
                raise _too_long(longest, held, num_prompt, num_output)
            if role is Role.DECODE and longest < limit:
                limit, why = longest, held
        if num_prompt >= limit:
            raise _too_long(limit, why, num_prompt, num_output)
        return limit, why

    async def _pump(
        self, request: Request, output: RequestOutputCollector, arrived_ns: int, deadline_s: float | None
    ) -> None:
        """Move events from the dispatcher to the collector as fast as they come; the server takes them at its own pace.

        The first answer that fails, or an end from outside, ends them all.
        """
        left_s = None if deadline_s is None else deadline_s - (now_ns() - arrived_ns) / 1e9
        sampling = request.sampling
        ranked = sampling.num_answers > sampling.n
        answers = [
            ChildRequest(
                index,
                each,
                request.id,
                self._text_stream(each.sampling, index),
                RequestOutputCollector() if ranked else output,
            )
            for index, each in enumerate(child_requests(request))
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(self._follow(answer, arrived_ns, left_s))
            best = sorted(answers, key=ChildRequest.by_rank)[: sampling.n] if ranked else answers
            if ranked:
                give_out(best, answers[0].prompt_logprobs, sampling, output)
            output.put(one_end(answers, best, ranked))
            output.end()
        except ExceptionGroup as errors:  # the collector raises it in the server's task
            output.fail(errors.exceptions[0])

    def _text_stream(self, sampling: SamplingParams, index: int) -> TextStream:
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        return TextStream(detokenizer, sampling, index)

    async def _follow(self, answer: ChildRequest, arrived_ns: int, deadline_s: float | None) -> None:
        dispatcher = self._context.dispatcher

        def take(event: Event) -> None:
            answer.take(event)
            if answer.stopped:
                dispatcher.finish(answer.request.id)

        await dispatcher.run(answer.request, take, deadline_s=deadline_s, arrived_ns=arrived_ns)


class _Running:
    """A request from its admission to the end of its iterator, which owns it."""

    def __init__(self, called: str, num_answers: int) -> None:
        self.called = called
        self.num_answers = num_answers
        self.output = RequestOutputCollector()
        self.pump: asyncio.Task[None] | None = None  # none while the prompt is being encoded

    def cancel(self, reason: Exception) -> None:
        """End it now, even when the server is stuck on a client that does not read."""
        self.output.fail(reason)
        if self.pump is not None:
            self.pump.cancel()

    async def close(self) -> None:
        """Returns when the dispatcher has let go of the request."""
        if self.pump is not None:
            self.pump.cancel()
            await asyncio.wait([self.pump])


def servable(view: ClusterView) -> bool:
    """Whether a worker is ready: where there is no pair, any one does both phases alone."""
    return any(worker.state is WorkerState.READY for worker in view.workers)


def _decode_slots(spec: ClusterSpec, view: ClusterView) -> int:
    """How many sequences can decode at once: on who is there, in the roles of now, or on all that may come."""
    slots = {pool.name: pool.engine.max_running for pool in spec.pools}
    decoding = (worker for worker in view.workers if worker.role is not Role.PREFILL)
    grown = (pool.bounds[1] * slots[pool.name] for pool in spec.pools if pool.role is not Role.PREFILL)
    return max(sum(slots.get(worker.pool, 0) for worker in decoding), sum(grown))


def _too_long(limit: int, why: str, num_prompt: int, num_output: int, field: str = "prompt") -> Unservable:
    """In the words of OpenAI's API: clients know by them that they must shorten the prompt."""
    parts = f"{num_prompt} in the prompt, {num_output} in the completion"
    asked = f"you requested {num_prompt + num_output} tokens ({parts})"
    return Unservable(
        f"This model's maximum context length is {limit} tokens{why}. However, {asked}; shorten it", field
    )


def _longest_sequence(view: ClusterView, role: Role) -> int | None:
    """The longest sequence that a worker of this role holds; None while no capacity is known."""
    capacities = (worker.capacity_tokens for worker in view.workers if worker.role in (role, Role.MIXED))
    return max((tokens for tokens in capacities if tokens > 0), default=None)
