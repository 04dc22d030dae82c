"""The gateway: checks requests, tokenizes prompts, detokenizes answers, and ends them at stop strings.

A request for several answers becomes one request per answer. They share their prompt's computation:

    req, n = 3   ──>   req#0, its seed      ──> answer 0   ┐
                       req#1, another seed  ──> answer 1   ├──> one stream of deltas by index, one Completed
                       req#2, another seed  ──> answer 2   ┘

Knows the served model and the latest view of the cluster; knows no wire format and no worker.

ClusterError (`cluster.events`)
├── DuplicateRequest    a request with this id is already running
├── RequestCancelled    `Gateway.cancel` ended it
└── GatewayClosed       `Gateway.close` ended it
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cluster.events import ClusterError, DeadlineExceeded, Delta, Event, Rejected
from cluster.frontend.context import GatewayContext, adapter_named, resolve
from cluster.frontend.embedding import PromptEmbedding, pooling_of
from cluster.frontend.output_collector import RequestOutputCollector, SendDelta
from cluster.frontend.parallel_sampling import ChildRequest, child_requests, emit_ranked, merged_end
from cluster.frontend.preprocessing import LARGE_BYTES, Preprocessing
from cluster.frontend.request_limits import RequestLimits, checked_name
from cluster.frontend.text import (
    EncodedPrompt,
    GatewayEvent,
    PromptInput,
    TextStream,
    Tokenizer,
    TokenPrompt,
    encode_packed,
    encode_prompt,
)
from cluster.observe.ledger import now_ns
from cluster.spec import adapter_name_problem
from diptych.request_ids import MAX_ID_CHARS, new_id
from diptych.view import Adapter, CachedPrompt, ClusterView, WorkerState
from workers.errors import InvalidRequest, ModelError
from workers.request import SLO, Grammar, Request, SamplingParams

MAX_GRAMMARS = 64  # remembered
RETRY_AFTER_S = 1.0
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
Run = Callable[[Request, Callable[[Event], None]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What a request has besides its prompt and sampling. Empty: chosen by the gateway, or none.

    `client_id`: a second id for `Gateway.cancel`, which several requests may share. `deadline_s` counts from the call.
    """

    slo: SLO = field(default_factory=SLO)
    request_id: str = ""
    client_id: str = ""
    deadline_s: float | None = None
    session: str = ""
    model: str = ""
    tenant: str = ""


NO_OPTIONS = GenerateOptions()


class DuplicateRequest(ClusterError):
    """A running request has this id."""


class RequestCancelled(ClusterError):
    """The caller ended the request through `Gateway.cancel`."""


class GatewayClosed(ClusterError):
    """The gateway was closed while the request ran."""


class Gateway:
    """Owned by its server. Owns `limits`, and `preprocessing`, which parses and tokenizes large inputs."""

    def __init__(self, context: GatewayContext, tokenizer: Tokenizer, preprocessing: Preprocessing) -> None:
        self._context = context
        self.tokenizer = tokenizer
        self.limits = RequestLimits(context)
        self.preprocessing = preprocessing
        self._requests: dict[str, _Running] = {}
        self.active = 0  # running answers
        self._grammars: OrderedDict[Grammar, asyncio.Task[Grammar]] = OrderedDict()  # each checked once

    @property
    def traces(self) -> bool:
        """Whether spans are sent; servers then pass trace headers to `cluster.observe.trace_context`."""
        return self._context.spec.tracing.otlp_endpoint is not None

    @property
    def view(self) -> ClusterView:
        return self._context.dispatcher.view

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The model's recommended sampling, by the names of `SamplingParams`; requests override it."""
        return dict(self._context.model.default_sampling)

    async def generate(
        self,
        prompt: PromptInput,
        sampling: SamplingParams,
        options: GenerateOptions = NO_OPTIONS,
        *,
        send_delta: SendDelta | None = None,
        keep: Collection[int] = (),
    ) -> AsyncGenerator[GatewayEvent, None]:
        """Yields Accepted, text deltas, each answer's end, and Completed. Joins deltas that a slow consumer left.

        Deltas of several answers interleave and have the answer's `index`. With `best_of` above n, deltas come only
        after all answers have ended. `send_delta` gets deltas, in order, while the iterator waits for its next event;
        the iterator then skips them. `keep`: special tokens that have text even if others are skipped. Closing the
        iterator cancels the request on its workers.
        Errors: `cluster.events`, `InvalidRequest`, `UnknownModel`, and those above.
        """
        async with self._running(prompt, sampling, options, send_delta) as (running, request, run):
            running.start(partial(self._run_answers, request, running.output, run, keep))
            while (event := await running.output.take()) is not None:
                yield event

    async def embed(self, prompt: PromptInput, options: GenerateOptions = NO_OPTIONS) -> PromptEmbedding:
        """The prompt's hidden states, pooled. Its worker computes it like the prompt of an answer of one token.

        Errors: as `generate`; `InvalidRequest` for a model without pooling.
        """
        pooling = await pooling_of(self._context.spec)
        sampling, events = replace(ONE_TOKEN, pooling=pooling), list[Event]()
        async with self._running(prompt, sampling, options) as (running, request, run):
            running.start(partial(run, request, events.append))
            while await running.output.take() is not None:
                pass
        parts = [part for event in events if isinstance(event, Delta) for part in event.pooled]
        return PromptEmbedding.of(parts, len(request.prompt) if pooling == "mean" else 1, len(request.prompt))

    @asynccontextmanager
    async def _running(
        self,
        prompt: PromptInput,
        sampling: SamplingParams,
        options: GenerateOptions,
        send_delta: SendDelta | None = None,
    ) -> AsyncIterator[tuple["_Running", Request, Run]]:
        """A checked request that counts as running, and what runs it at workers. At the end it is cancelled there."""
        arrived_ns = now_ns()
        adapter = self._adapter(options.model)
        self.limits.check_answers(sampling)
        checked_name("tenant", options.tenant, MAX_ID_CHARS)
        request_id = options.request_id or new_id()
        running = self._enter(request_id, options, sampling.num_answers, send_delta)
        try:
            try:
                async with asyncio.timeout(options.deadline_s):
                    if sampling.grammar is not None:
                        sampling = replace(sampling, grammar=await self._checked(sampling.grammar))
                    tokens = await self.encode(prompt, sampling.max_tokens or 1)
            except TimeoutError:
                raise DeadlineExceeded("admission") from None
            request = Request(
                request_id,
                tokens,
                self.limits.resolve(sampling, len(tokens)),
                options.slo,
                session=options.session,
                tenant=options.tenant,
                shares_prefixes=self._context.spec.gateway.share_prefixes,
                adapter=adapter,
            )
            left_s = None if options.deadline_s is None else options.deadline_s - (now_ns() - arrived_ns) / 1e9
            yield running, request, partial(self._context.dispatcher.run, deadline_s=left_s, arrived_ns=arrived_ns)
        finally:
            try:
                await running.close()
            finally:  # also if this task is cancelled while it waits
                del self._requests[request_id]
                self.active -= running.num_answers

    async def warm(self, prompt: PromptInput, tenant: str, pool: str, ttl_s: float) -> Sequence[CachedPrompt]:
        """Compute a prompt on each worker that prefills, and pin it until `ttl_s` after its last use (0: do not).

        Errors: as `generate`.
        """
        return await self._context.dispatcher.warm(await self._prompt_of(prompt, tenant), pool, ttl_s)

    async def unpin(self, prompt: PromptInput | None, tenant: str, pool: str) -> Sequence[CachedPrompt]:
        """Unpin a prompt of this tenant, or all of all tenants, on each worker that prefills. Errors: as `generate`."""
        request = None if prompt is None else await self._prompt_of(prompt, tenant)
        return await self._context.dispatcher.unpin(request, pool)

    async def _prompt_of(self, prompt: PromptInput, tenant: str) -> Request:
        """A request that computes a prompt, and as little else as possible."""
        checked_name("tenant", tenant, MAX_ID_CHARS)
        shares = self._context.spec.gateway.share_prefixes
        return Request(new_id(), await self.encode(prompt), ONE_TOKEN, tenant=tenant, shares_prefixes=shares)

    def name_of(self, model: str | None) -> str:
        """The name of what a request's `model` means: the served model's, or the adapter's. Raises `UnknownModel`."""
        adapter = self._adapter(model or "")
        return self._context.model.name if adapter is None else adapter.name

    def _adapter(self, model: str) -> Adapter | None:
        """The adapter that a request's `model` names. Raises `UnknownModel`."""
        name, adapters = self._context.model.name, self._context.dispatcher.adapters
        if adapters and model != name and (found := adapter_named(model, adapters)) is not None:
            return found
        resolve(model, [name], adapters)
        return None

    async def read_adapter(self, name: str, path: str) -> Adapter:
        """The adapter in this folder, checked against the model. Raises `InvalidRequest`."""
        model = self._context.model.name
        if problem := adapter_name_problem(name, model):
            raise InvalidRequest("name", problem)
        from workers.model.store import find_adapter

        try:
            return await asyncio.to_thread(find_adapter, name, path, model)
        except ModelError as error:
            raise InvalidRequest("path", str(error)) from None

    async def encode(self, prompt: PromptInput, num_output: int = 1) -> tuple[int, ...]:
        """A prompt's token ids. Tokenizes large prompts outside the event loop.

        Raises `InvalidRequest`, and `Unservable` if the context cannot hold it; `num_output` is for that message.
        """
        if isinstance(prompt, EncodedPrompt):
            encoded = prompt
        elif isinstance(prompt, TokenPrompt) or prompt.num_bytes <= LARGE_BYTES:
            return encode_prompt(self.tokenizer, prompt, self.limits.bounds)
        else:
            encoded = await self.preprocessing.call(prompt.num_bytes, encode_packed, prompt, self.limits.bounds)
        if encoded.num_tokens > self.limits.bounds.context_length:
            self.limits.max_tokens(encoded.num_tokens, num_output)
        return encoded.tokens

    async def _checked(self, grammar: Grammar) -> Grammar:
        """The grammar as workers compile it. Compiles a new one outside the event loop, once for all requests that wait
        for it. Raises `InvalidRequest`, and `Rejected`.
        """
        checking = self._grammars.pop(grammar, None)
        if checking is None or (checking.done() and checking.exception() is not None):
            checking = asyncio.create_task(self.preprocessing.check_grammar(grammar))
        self._grammars[grammar] = checking
        while len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        return await asyncio.shield(checking)

    def cancel(self, request_id: str) -> bool:
        """End the requests with this id or client id at once; their iterators raise `RequestCancelled`.

        Returns whether there was one.
        """
        found = [each for each in self._requests.items() if request_id in (each[0], each[1].client_id or each[0])]
        for known, running in found:
            running.cancel(RequestCancelled(f"request {known} was cancelled by its caller"))
        return bool(found)

    async def close(self) -> None:
        """Cancel all running requests, and wait until the dispatcher has ended them."""
        running = list(self._requests.values())
        for each in running:
            each.cancel(GatewayClosed("the gateway was closed; try again, here or at another gateway"))
        await self.preprocessing.aclose()
        await asyncio.gather(*(each.close() for each in running))

    def _enter(
        self, request_id: str, options: GenerateOptions, num_answers: int, send_delta: SendDelta | None
    ) -> "_Running":
        checked_name("request_id", request_id, MAX_ID_CHARS, without="/#")
        if request_id in self._requests:
            raise DuplicateRequest(f"request {request_id} is running already; choose another id or leave it empty")
        limit = self._context.spec.gateway.max_requests
        if (active := self.active) + num_answers > limit:
            self._context.dispatcher.count_refusal(options.slo.class_name, "gateway-full")
            room = f"{active} of {limit} requests are in flight, and {num_answers} more do not fit"
            raise Rejected(f"{room} in this gateway; try again", RETRY_AFTER_S, "gateway-full")
        running = self._requests[request_id] = _Running(options.client_id, num_answers, send_delta)
        self.active += num_answers
        return running

    async def _run_answers(
        self, request: Request, output: RequestOutputCollector, run: Run, keep: Collection[int]
    ) -> None:
        """Move events from the dispatcher to the collector; the server reads them at its own pace.

        The first answer that fails, or a cancellation, ends all answers.
        """
        sampling = request.sampling
        ranked = sampling.num_answers > sampling.n
        answers = [
            ChildRequest(
                index,
                each,
                request.id,
                self._text_stream(each.sampling, index, keep),
                RequestOutputCollector() if ranked else output,
                partial(self._context.dispatcher.finish, each.id),
            )
            for index, each in enumerate(child_requests(request))
        ]
        if len(answers) == 1:
            await run(answers[0].request, answers[0].take)
        else:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(run(answer.request, answer.take))
        best = sorted(answers, key=ChildRequest.by_rank)[: sampling.n] if ranked else answers
        if ranked:
            emit_ranked(best, answers[0].prompt_logprobs, sampling, output)
        output.put(merged_end(answers, best, ranked))

    def _text_stream(self, sampling: SamplingParams, index: int, keep: Collection[int]) -> TextStream:
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens, keep=keep)
        return TextStream(detokenizer, sampling, index)


class _Running:
    """A running request. Owned by `Gateway.generate` or `embed`."""

    def __init__(self, client_id: str, num_answers: int, send_delta: SendDelta | None) -> None:
        self.client_id = client_id
        self.num_answers = num_answers
        self.output = RequestOutputCollector(send_delta)
        self.pump: asyncio.Task[None] | None = None  # None while the prompt is being encoded

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run it; its end or its error goes to the collector, which raises that in the server's task."""
        self.pump = asyncio.create_task(self._pump(work))

    async def _pump(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
            self.output.end()
        except ExceptionGroup as errors:
            self.output.fail(errors.exceptions[0])
        except Exception as error:
            self.output.fail(error)

    def cancel(self, reason: Exception) -> None:
        """End it at once, even if the server waits for a client that does not read."""
        self.output.fail(reason)
        if self.pump is not None:
            self.pump.cancel()

    async def close(self) -> None:
        """Cancel the pump, and wait until the dispatcher has ended the request."""
        if self.pump is not None and not self.pump.done():
            self.pump.cancel()
            await asyncio.wait([self.pump])


def servable(view: ClusterView) -> bool:
    """Whether a worker is ready; without a linked pair, any worker runs both phases alone."""
    return any(worker.state is WorkerState.READY for worker in view.workers)
