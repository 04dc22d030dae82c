"""The HTTP routes of one model, which read a body and reply. `cluster.frontend.http.app` has their paths."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from fastapi import Request
from starlette.responses import Response

from cluster.frontend.context import GatewayContext
from cluster.frontend.embedding import PromptEmbedding, makes_embeddings
from cluster.frontend.gateway import Gateway, GenerateOptions
from cluster.frontend.http.bodies import CompletionBody, DetokenizeBody, Generation
from cluster.frontend.http.chat_body import ChatBody, Item, TokenizeBody
from cluster.frontend.http.embeddings import EmbeddingsBody, embeddings_json
from cluster.frontend.http.failures import JSON
from cluster.frontend.http.messages_body import CountTokensBody, MessagesBody
from cluster.frontend.http.messages_wire import MessagesWire
from cluster.frontend.http.middleware import NAME, RequestName
from cluster.frontend.http.openai_wire import ChatWire, CompletionWire, Echo
from cluster.frontend.http.preprocess import (
    detokenize,
    items_of,
    read_generation,
    read_previous_id,
    read_response,
    read_tokens,
    tokenize,
)
from cluster.frontend.http.reply import MAX_CONCURRENT_PROMPTS, ParsedRequest, Reply, of_prompt
from cluster.frontend.http.responses_body import History, ResponsesBody, ResponseStore, size_of
from cluster.frontend.http.responses_wire import ResponsesWire
from cluster.frontend.http.wire import Wire
from cluster.frontend.preprocessing import LARGE_BYTES
from cluster.frontend.request_limits import MAX_CLASS_CHARS, checked_name
from cluster.frontend.text import EncodedPrompt, PromptInput, TextPrompt, TokenPrompt, text_from
from cluster.frontend.tools.answer_plan import AnswerPlan, AnswerPlanner
from cluster.frontend.tools.formats import CONTENT
from cluster.observe.trace_context import set_trace_headers
from workers.errors import InvalidRequest
from workers.log_fields import log_fields
from workers.request import SLO

logger = logging.getLogger(__name__)

GENERATIONS: Mapping[str, type[Generation | MessagesBody | EmbeddingsBody]] = {
    "/v1/embeddings": EmbeddingsBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
}
RESPONSES = "/v1/responses"
TOKENS: Mapping[str, type[TokenizeBody | DetokenizeBody]] = {"/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}


class ModelRoutes:
    """Owned by the application, which shares `responses` and `encoding` (a thread that encodes) between models."""

    def __init__(
        self, context: GatewayContext, gateway: Gateway, responses: ResponseStore, encoding: asyncio.Semaphore
    ) -> None:
        self.gateway = gateway
        self._context = context
        self._started_s = int(time.time())
        self._encoding = encoding
        self._responses = responses

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        prompts, echoes = _prompts(body, request), list[Echo]()
        if body.echo:
            echoes = [await self._echo(each, body.wanted_tokens or 1) for each in prompts]
            prompts = [TokenPrompt(each.tokens) for each in echoes]
        name, model = request.scope[NAME].unique, self.gateway.name_of(body.model)
        wire = CompletionWire(name, model, body, self.gateway.tokenizer, echoes)
        return self._reply(body, prompts, AnswerPlan(), request, wire)

    async def _echo(self, prompt: PromptInput, num_output: int) -> Echo:
        tokens = await self.gateway.encode(prompt, num_output)
        if isinstance(prompt, TextPrompt | EncodedPrompt):
            return Echo(prompt.text, tokens)
        return Echo(text_from(self.gateway.tokenizer, tokens), tokens)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        prompts, plan = await self._planned(body, request)
        name, model = request.scope[NAME].unique, self.gateway.name_of(body.model)
        wire = ChatWire(name, model, body, self.gateway.tokenizer, plan.make_parser)
        return self._reply(body, prompts, plan, request, wire)

    async def messages(self, body: MessagesBody, request: Request) -> Response:
        prompts, plan = await self._planned(body.chat, request)
        wire = MessagesWire(request.scope[NAME].unique, self.gateway.name_of(body.model), plan.make_parser or CONTENT)
        return self._reply(body.chat, prompts, plan, request, wire)

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        tenant = parse_headers(request.headers, request.scope[NAME]).tenant
        history = self._responses.history(tenant, body.previous_response_id)
        if not hasattr(request.state, "items") and size_of(history) > LARGE_BYTES:
            await self._read_response(request, body.model_dump_json(exclude_unset=True).encode(), history)
        items: bytes | None = getattr(request.state, "items", None)
        chat = body.chat_after(items_of(history) if items is None else ())  # the prompt is encoded, if there are items
        prompts, plan = await self._planned(chat, request)
        name = f"resp_{request.scope[NAME].unique}"

        def keep(output: list[Item]) -> None:
            if body.store is not False:
                new = json.dumps(body.items).encode() if items is None else items
                self._responses.keep(tenant, name, history, (new, json.dumps(output).encode()))

        repeated = body.repeated(chat.sampling(self.gateway.default_sampling))
        wire = ResponsesWire(name, self.gateway.name_of(body.model), repeated, plan.make_parser or CONTENT, keep)
        return self._reply(chat, prompts, plan, request, wire)

    async def _read_response(self, request: Request, raw: bytes, history: History) -> dict[str, Any]:
        """The fields of a large conversation's request; its prompt and items become those of `request.state`."""
        gateway, size = self.gateway, len(raw) + size_of(history)
        call = gateway.preprocessing.call
        read = await call(size, read_response, raw, history, gateway.limits.bounds, gateway.default_sampling)
        request.state.prompts, request.state.items = read.prompts, read.items
        return read.fields

    async def count_tokens(self, body: CountTokensBody, request: Request) -> Response:
        (prompt,), _ = await self._planned(body.chat, request)
        tokens = prompt.tokens if isinstance(prompt, TokenPrompt) else await self.gateway.encode(prompt)
        return Response(json.dumps({"input_tokens": len(tokens)}), media_type=JSON)

    async def _planned(self, body: ChatBody, request: Request) -> tuple[Sequence[PromptInput], AnswerPlan]:
        """The prompt, and how its answers are read."""
        tools, wanted, prompts = body.tool_request, body.wanted_grammar, _prompts(body, request)
        tokens: tuple[int, ...] = ()
        with body.client_errors():
            if self._planner.needs_prompt:
                (tokens,) = [await self.gateway.encode(each, body.wanted_tokens or 1) for each in prompts]
                prompts = [TokenPrompt(tokens)]
            plan = self._planner.plan
            if tools is None:
                return prompts, plan(None, wanted, tokens)
            return prompts, await asyncio.to_thread(plan, tools, wanted, tokens)  # large schemas take milliseconds

    @cached_property
    def _planner(self) -> AnswerPlanner:
        spec = self._context.spec.gateway
        return AnswerPlanner(self.gateway.tokenizer, spec.tool_call_parser, spec.reasoning_parser)

    def _reply(
        self, body: Generation, prompts: Sequence[PromptInput], plan: AnswerPlan, request: Request, wire: Wire
    ) -> Response:
        name = request.scope[NAME]
        options = parse_headers(request.headers, name, body.model)
        if self.gateway.traces:
            set_trace_headers(request.headers.items())
        if not name.is_prefix:
            more = log_fields(self._context.name, name.unique)
            logger.info("request %s has x-request-id %.500r", name.unique, name.given, extra=more)
        sampling = body.sampling(self.gateway.default_sampling)
        parsed = ParsedRequest(
            prompts,
            sampling if plan.grammar is None else replace(sampling, grammar=plan.grammar),
            options,
            client_names=body.client_names,
            stream=bool(body.stream),
            scores_only=isinstance(body, CompletionBody) and body.scores_only,
            keep=plan.keep,
        )
        return Reply(self.gateway, parsed, wire, self._encoding)

    async def embeddings(self, body: EmbeddingsBody, request: Request) -> Response:
        options = parse_headers(request.headers, request.scope[NAME], body.model)
        prompts = _prompts(body, request)
        body.sampling()
        slots = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

        async def embed(index: int, prompt: PromptInput) -> PromptEmbedding:
            async with slots:
                return await self.gateway.embed(prompt, of_prompt(options, index, len(prompts)))

        with body.client_errors():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(embed(*each)) for each in enumerate(prompts)]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            found = embeddings_json(self.gateway.name_of(body.model), [task.result() for task in tasks], body)
        return Response(found, media_type=JSON)

    async def tokenize(self, body: TokenizeBody) -> Response:
        return Response(tokenize(self.gateway.tokenizer, body, self.gateway.limits.bounds), media_type=JSON)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        return Response(detokenize(self.gateway.tokenizer, body, self.gateway.limits.bounds), media_type=JSON)

    async def large(self, request: Request, raw: bytes) -> Response | None:
        """The response to a large body; None: the route continues with a small body and the encoded prompts."""
        gateway, path = self.gateway, request.scope["path"]
        call = gateway.preprocessing.call
        if path in TOKENS:
            model, answer = await call(len(raw), read_tokens, TOKENS[path], raw, gateway.limits.bounds)
            gateway.name_of(model)
            return Response(answer, media_type=JSON)
        if path == RESPONSES:
            tenant = parse_headers(request.headers, request.scope[NAME]).tenant
            history = self._responses.history(tenant, await call(len(raw), read_previous_id, raw))
            request._json = await self._read_response(request, raw, history)
            request._body = b"{}"
            return None
        body = await call(
            len(raw), read_generation, GENERATIONS[path], raw, gateway.limits.bounds, gateway.default_sampling
        )
        request._json, request.state.prompts = body.fields, body.prompts
        request._body = b"{}"  # frees the large body; FastAPI checks that there is one
        return None

    async def describe_all(self) -> list[dict[str, Any]]:
        """The model and its adapters, as in `GET /v1/models`."""
        return [await self.describe(name) for name in ("", *self._context.dispatcher.adapters)]

    async def describe(self, name: str) -> dict[str, Any]:
        """An adapter has the model that it changes as its `parent`. Raises `UnknownModel`."""
        model = self._context.model
        found = self.gateway.name_of(name)
        return {
            "id": found,
            "object": "model",
            "parent": None if found == model.name else model.name,
            "created": self._started_s,
            "owned_by": "diptych",
            "max_model_len": self.gateway.limits.max_model_len,
            "capabilities": {
                "chat": bool(self.gateway.tokenizer.info.get("chat_template")),
                "tool_calls": self._planner.reads_calls,
                "reasoning": self._planner.needs_prompt,
                "embeddings": await makes_embeddings(self._context.spec),
                "structured_output": find_spec("llguidance") is not None,
            },
            "default_sampling_params": self.gateway.default_sampling,
        }


def _prompts(body: Generation | EmbeddingsBody, request: Request) -> Sequence[PromptInput]:
    """The prompts; those of a large body are already encoded."""
    encoded: Sequence[PromptInput] | None = getattr(request.state, "prompts", None)
    return body.prompts() if encoded is None else encoded


def parse_headers(headers: Mapping[str, str], name: RequestName, model: str | None = None) -> GenerateOptions:
    """`headers` have lower-case names. Raises `InvalidRequest` with the header's name."""
    class_name = headers.get("x-diptych-slo-class", "") or "default"
    return GenerateOptions(
        slo=SLO(
            _seconds(headers, "x-diptych-ttft-ms"),
            _seconds(headers, "x-diptych-tpot-ms"),
            checked_name("x-diptych-slo-class", class_name, MAX_CLASS_CHARS),
        ),
        request_id=name.unique,
        client_id=name.given,
        deadline_s=_seconds(headers, "x-diptych-timeout-ms"),
        session=headers.get("x-diptych-session", ""),
        model=model or "",
        tenant=headers.get("x-diptych-tenant", ""),
    )


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        value_s = float(given) / 1000
    except ValueError:
        value_s = math.nan
    if not 0.0 < value_s < math.inf:
        raise InvalidRequest(name, f"is {given[:40]!r}; it must be a number of milliseconds above 0")
    return value_s
