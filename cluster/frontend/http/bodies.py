"""Request bodies of OpenAI's API. `cluster.frontend.http.fields` lists the fields that are not supported.

Pure. pydantic checks types, and `InvalidRequest` reports everything that types cannot express. `SamplingParams` and the
gateway check ranges.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, GetJsonSchemaHandler, model_validator

from cluster.events import Unservable
from cluster.frontend.http.fields import (
    HARMLESS,
    STREAM_FIELDS,
    check_off,
    check_supported,
    complete,
    complete_object,
)
from cluster.frontend.http.structured import grammar_from
from cluster.frontend.text import RawPrompt, TextPrompt, TokenPrompt
from workers.errors import InvalidRequest
from workers.request import MAX_BIASES, Grammar, SamplingParams

MAX_PROMPTS = 1024  # of one request; `cluster.frontend.http.reply` bounds how many of them run at once
# Scalar fields with the same name and meaning in `SamplingParams`.
SCALARS = (
    *("temperature", "top_p", "min_p", "min_tokens", "ignore_eos", "n", "best_of", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
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
        return complete_object(handler.resolve_ref_schema(handler(core)), cls.off)


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
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise InvalidRequest("logit_bias", f"must be an object of at most {MAX_BIASES} token ids and biases")
    try:
        return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest("logit_bias", 'must have token ids and numbers, such as {"42": -100}') from None
