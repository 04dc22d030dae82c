"""Request bodies of OpenAI's API. `cluster.frontend.http.unsupported` lists the fields that are not supported.

Pure. pydantic checks types, and `InvalidRequest` reports everything that types cannot express. `SamplingParams` and the
gateway check ranges.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, GetJsonSchemaHandler, model_validator

from cluster.events import Unservable
from cluster.frontend.http.fields import HARMLESS, complete, complete_object
from cluster.frontend.http.structured import grammar_from
from cluster.frontend.http.tool_fields import CallHistory, tool_request
from cluster.frontend.http.unsupported import (
    MESSAGE_FIELDS,
    OFF,
    STREAM_FIELDS,
    check_off,
    check_supported,
)
from cluster.frontend.text import ChatPrompt, RawPrompt, TextPrompt, TokenPrompt, check_depth
from cluster.frontend.tools.answer_plan import ToolRequest
from workers.errors import InvalidRequest
from workers.request import MOST_BIASES, Grammar, SamplingParams

MAX_PROMPTS = 1024  # of one request; `cluster.frontend.http.reply` bounds how many of them run at once
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
# Scalar fields with the same name and meaning in `SamplingParams`.
SCALARS = (
    *("temperature", "top_p", "min_p", "min_tokens", "ignore_eos", "n", "best_of", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
EFFORT_NAME = {"chat_template_kwargs.reasoning_effort": "reasoning_effort"}
NOTHING: Mapping[str, Any] = {}


class FirstError(FailFast):
    """Stops at the first error in a list. Unlike its base class, it is hashable and so works in unions."""

    __hash__ = object.__hash__


Strings = Annotated[list[str], FirstError()]
Integers = Annotated[list[int], FirstError()]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None

    least: ClassVar[Mapping[str, float]] = {"top_k": -1}  # lowest values that this API has otherwise than `BOUNDS`
    limited: ClassVar[Mapping[str, Any]] = {}  # fields of this API of which only null and this value are supported
    harmless: ClassVar[str] = HARMLESS  # what is said of fields that are known but not read

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            check_supported(given, cls.known_fields())
        return given

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        return complete(schema, cls.known_fields(), harmless=cls.harmless, least=cls.least, limited=cls.limited)

    @classmethod
    def known_fields(cls) -> Collection[str]:
        return cls.model_fields.keys()

    @property
    def client_names(self) -> Mapping[str, str]:
        """The gateway's field names and what this body calls them, where they differ."""
        return {}

    @contextmanager
    def client_errors(self) -> Iterator[None]:
        """Errors raised in the block name the field as the client did."""
        try:
            yield
        except InvalidRequest as error:
            raise InvalidRequest(self._client_name(error.field), error.message) from None
        except Unservable as error:
            raise Unservable(error.message, self._client_name(error.field)) from None

    def _client_name(self, field: str) -> str:
        names = self.client_names
        return names.get(field) or re.sub(r"^prompt\.(text|tokens)", names.get("prompt", "prompt"), field)


class BodyPart(BaseModel):
    """An object in a body. Its reader refuses the other fields; of `off` those that request nothing pass."""

    model_config = ConfigDict(extra="allow")
    off: ClassVar[Collection[str]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return complete_object(handler.resolve_ref_schema(handler(core)), cls.off, OFF)


class StreamOptions(BodyPart):
    off = STREAM_FIELDS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Body):
    """The common fields of completions and chat. None: the gateway's default."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    min_tokens: int | None = None
    stop_token_ids: Integers | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def client_names(self) -> Mapping[str, str]:
        found = grammar_from(vars(self))
        return {} if found is None else {"sampling.grammar": found[0]}

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Number of alternatives per token; None: no logprobs."""

    @property
    def wanted_grammar(self) -> Grammar | None:
        """Of content."""
        found = grammar_from(vars(self))
        return None if found is None else found[1]

    @property
    def scores_only(self) -> bool:
        """Whether the client wants only the prompt's logprobs, and no answer."""
        return False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @abstractmethod
    def prompts(self) -> list[RawPrompt]:
        """The prompts, one request each."""

    def sampling(self, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
        """`defaults` apply to missing fields."""
        given = {**defaults, **{name: value for name in SCALARS if (value := getattr(self, name)) is not None}}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k) if self.top_k >= -1 else self.top_k  # many clients send -1 for off
        if self.include_stop_str_in_output is not None:
            given["include_stop_in_output"] = self.include_stop_str_in_output
        with self.client_errors():
            sampling = SamplingParams(
                **given,
                grammar=self.wanted_grammar,
                seed=_seed(self.seed),
                max_tokens=self.wanted_tokens,
                logprobs=self.wanted_logprobs,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logit_bias=_biases(self.logit_bias),
            )
        if self.stream_options is not None:
            check_off("stream_options", self.stream_options.model_extra or {}, STREAM_FIELDS)
            if not self.stream:
                raise InvalidRequest("stream_options", "apply to streams only; set stream to true, or leave them out")
        if self.stream and sampling.num_answers > sampling.n:
            raise InvalidRequest("best_of", f"is {sampling.best_of}; the best are known at the end: leave out stream")
        return sampling


class CompletionBody(Generation):
    """POST /v1/completions."""

    least: ClassVar[Mapping[str, float]] = {**Body.least, "max_tokens": 0}  # with echo

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def scores_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def wanted_tokens(self) -> int | None:
        """At least one token must be sampled; with `scores_only` it is dropped."""
        return 1 if self.scores_only else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def sampling(self, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens", "is 0; it must be at least 1, or 0 together with echo")
        if self.scores_only and self.min_tokens:
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}; it must be at most max_tokens (0)")
        sampling = super().sampling(defaults)
        if not self.echo or self.logprobs is None:
            return sampling
        if self.stream and sampling.n > 1:
            raise InvalidRequest("echo", "with logprobs and several answers cannot stream; leave out stream or n")
        return replace(sampling, prompt_logprobs=self.logprobs)

    def prompts(self) -> list[RawPrompt]:
        """Text, token ids, or a list of either."""
        return one_or_more_prompts("prompt", self.prompt, self.add_special_tokens is not False)


class TextPart(BodyPart):
    type: str
    text: str | None = None


class ChatMessage(BodyPart):
    """`name` is not passed to the chat template; a tool's message has the name of the tool instead."""

    off = MESSAGE_FIELDS

    role: str
    content: str | Annotated[list[TextPart], FirstError()] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning_content: str | None = None


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FirstError()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], FirstError()] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {"prompt": "messages", "sampling.max_tokens": tokens, "sampling.logprobs": "top_logprobs"}
        return {"sampling.grammar": "tools", **super().client_names, **names, **EFFORT_NAME}

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is given without logprobs; set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self) -> list[RawPrompt]:
        return self._prompts

    @cached_property
    def _prompts(self) -> list[RawPrompt]:
        return [_chat_prompt(self, [] if self.tool_request is None else self.tools)]

    @cached_property
    def tool_request(self) -> ToolRequest | None:
        """None: the answer calls no tools, and the model sees none. Raises `InvalidRequest`."""
        asked, wanted = tool_request(self.tools, self.tool_choice, self.parallel_tool_calls), grammar_from(vars(self))
        if asked is not None and not asked.must_call and wanted is not None and wanted[1].kind != "json":
            raise InvalidRequest(wanted[0], "leaves no room for a tool call; leave it out, or set tool_choice to none")
        return asked


class TokenizeBody(Body):
    """POST /tokenize: a text or messages, tokenized as a completion or a chat would.

    Accepts the body of a completion or a chat too, and ignores its other fields.
    """

    harmless: ClassVar[str] = "Ignored: the body of a completion or a chat is accepted too."

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FirstError()] | None = None
    tools: Annotated[list[dict[str, Any]], FirstError()] | None = None
    tool_choice: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @classmethod
    def known_fields(cls) -> Collection[str]:
        return {*cls.model_fields, *CompletionBody.model_fields, *ChatBody.model_fields}

    @property
    def client_names(self) -> Mapping[str, str]:
        return {} if self.messages is None else {"prompt": "messages", **EFFORT_NAME}

    def input(self) -> RawPrompt:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "or messages is needed, and not both")
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens is not False)
        asked = tool_request(self.tools, self.tool_choice, None)  # refuses what a chat would
        return _chat_prompt(self, [] if asked is None else self.tools)


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Integers


class MalformedBody(Exception):
    """The body is not JSON, or a field has a wrong type. `path` of that field, such as `messages[0].content`; empty:
    the whole body.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.message = message
        self.path = path

    @classmethod
    def not_json(cls, reason: str) -> "MalformedBody":
        return cls(f"the body is not JSON: {reason}")

    @classmethod
    def of(cls, errors: Sequence[Any], given: object) -> "MalformedBody":
        """The first of pydantic's errors about `given`; among the members of a union, the one that fits best."""
        found = [(_path(each, given), str(each["msg"])) for each in errors]
        first = found[0][0]
        path, message = max((each for each in found if each[0].startswith(first)), key=lambda each: len(each[0]))
        if not path:
            return cls("the body is not a JSON object; send one as application/json")
        return cls(f"{path}: {message}", path)


def _path(error: Mapping[str, Any], given: object) -> str:
    """The path of the wrong value. pydantic's own path also contains the names of union members."""
    path, missing = "", error["type"] == "missing"
    for part in error["loc"]:
        if isinstance(given, dict) and isinstance(part, str) and (part in given or missing):
            path += f".{part[:64]}" if path else part[:64]
            given = given.get(part)
        elif isinstance(given, list) and isinstance(part, int):
            path += f"[{part}]"
            given = given[part] if part < len(given) else None
    return path


def _chat_prompt(body: ChatBody | TokenizeBody, tools: list[dict[str, Any]] | None) -> ChatPrompt:
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens", "is not supported with messages; the chat template has them")
    messages = tuple((each.role, _content(index, each)) for index, each in enumerate(body.messages or ()))
    fields = _message_fields(body.messages or ())
    for index, tool in enumerate(tools or ()):
        check_depth(f"tools[{index}]", tool)
    check_depth("chat_template_kwargs", body.chat_template_kwargs)
    variables = json.dumps(_variables(body)) if _variables(body) else ""
    return ChatPrompt(messages, tuple(map(json.dumps, tools or ())), variables, fields)


def _variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Of the chat template."""
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs or {}
    if effort not in EFFORTS:
        raise InvalidRequest("reasoning_effort", f"{effort[:40]!r} is not supported; {', '.join(EFFORTS)} are")
    return {"reasoning_effort": effort, **(body.chat_template_kwargs or {})}


def _message_fields(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """As `ChatPrompt.message_fields`."""
    calls, found = CallHistory(), []
    for index, message in enumerate(messages):
        fields = calls.read(
            index, message.role, {"tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
        )
        if message.reasoning_content:
            fields["reasoning_content"] = message.reasoning_content
        found.append(fields)
    return tuple(map(json.dumps, found)) if any(found) else ()


def _content(index: int, message: ChatMessage) -> str:
    check_off(f"messages[{index}]", message.model_extra or {}, MESSAGE_FIELDS)
    where = f"messages[{index}].content"
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(where, "is missing; give text, which may be empty")
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise InvalidRequest(where, f"has a part of type {part.type[:40]!r}; only parts with text are supported")
        if part.model_extra:
            raise InvalidRequest(f"{where}.{next(iter(part.model_extra))[:64]}", "is unknown; leave it out")
    return "".join(part.text or "" for part in message.content)


def one_or_more_prompts(field: str, given: Any, special: bool) -> list[RawPrompt]:
    """Text, token ids, or a list of either. `special`: whether texts get the model's special tokens."""
    single = _one_prompt(given, special)
    if single is not None:
        return [single]
    if not isinstance(given, list) or not given:
        raise InvalidRequest(field, "is missing; give text, a list of token ids, or a list of such prompts")
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(field, f"has {len(given)} prompts; a request has at most {MAX_PROMPTS}")
    found = [_one_prompt(each, special) for each in given]
    if None in found:
        raise InvalidRequest(f"{field}[{found.index(None)}]", "is neither text nor a list of token ids")
    return [each for each in found if each is not None]


def _one_prompt(value: object, special: bool) -> RawPrompt | None:
    if isinstance(value, str):
        return TextPrompt(value, special)
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return TokenPrompt(tuple(value))
    return None


def _seed(value: int | None) -> int | None:
    """-1 is a random seed, as in vLLM; other negative numbers are taken as unsigned 64-bit numbers."""
    if value is None or value == -1:
        return None
    if not -(2**63) <= value < 2**64:
        raise InvalidRequest("seed", f"is {value}; it must be a 64-bit number, or -1 for a random one")
    return value % 2**64


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise InvalidRequest("logit_bias", f"must be an object of at most {MOST_BIASES} token ids and biases")
    try:
        return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest("logit_bias", 'must have token ids and numbers, such as {"42": -100}') from None
