"""Parses and tokenizes large bodies outside the event loop: what `cluster.frontend.preprocessing` runs for HTTP.

Pure but for the tokenizer. The result is small: the fields of a body without its prompts, and the prompts' token ids.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from cluster.events import Unservable
from cluster.frontend.http.bodies import Body, CompletionBody, DetokenizeBody, Generation, TokenizeBody, first_error
from cluster.frontend.text import (
    EncodedPrompt,
    GenerationInput,
    PromptBounds,
    TextPrompt,
    Tokenizer,
    encode_apart,
    encode_prompt,
    text_of,
)
from workers.errors import InvalidRequest

MOST_FIELD_BYTES = 64 << 10  # of a body without its prompts: what a list of stops and biases at their bounds takes
REQUIRED = {"messages"}  # it stays, empty

AnyBody = TypeVar("AnyBody", bound=Body)


class Malformed(Exception):
    """A body of another form: the first thing that is wrong, and the field's path; empty: the whole body."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.message = message
        self.path = path

    @classmethod
    def no_json(cls, reason: str) -> "Malformed":
        return cls(f"the body is not JSON: {reason}")

    @classmethod
    def of(cls, errors: Sequence[Any], given: object) -> "Malformed":
        """From pydantic's errors about what was given."""
        path, message = first_error(errors, given)
        if not path:
            return cls("the body is no JSON object; send one as application/json")
        return cls(f"{path}: {message}", path)


@dataclass(frozen=True, slots=True)
class ReadBody:
    """`fields`: what the body's own class takes. `prompts` stand for those that were in it."""

    fields: dict[str, Any]
    prompts: tuple[EncodedPrompt, ...]


def read_generation(
    tokenizer: Tokenizer, kind: type[Generation], raw: bytes, bounds: PromptBounds, defaults: Mapping[str, Any]
) -> ReadBody:
    """Raises what the gateway raises for a prompt, and `Malformed`."""
    body = _parsed(kind, raw)
    prompts = body.prompts()
    body.sampling(defaults)  # so that lists beyond their bounds go no further
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    with _named(body):
        encoded = tuple(_encoded(tokenizer, prompt, bounds, echo) for prompt in prompts)
    left_out = {"prompt", "messages", "tools", "response_format", "chat_template_kwargs"}
    emptied: dict[str, Any] = {name: [] for name in REQUIRED & kind.model_fields.keys()}
    fields = body.model_dump(exclude_unset=True, exclude=left_out) | emptied
    for name, value in fields.items():
        if len(pickle.dumps(value)) > MOST_FIELD_BYTES:
            raise InvalidRequest(name, f"has more than {MOST_FIELD_BYTES >> 10} KiB; send less")
    return ReadBody(fields, encoded)


def read_tokenize(tokenizer: Tokenizer, raw: bytes, bounds: PromptBounds) -> tuple[str, bytes]:
    """The model that is asked for, and the answer as JSON."""
    body = _parsed(TokenizeBody, raw)
    return body.model or "", tokenized(tokenizer, body, bounds)


def tokenized(tokenizer: Tokenizer, body: TokenizeBody, bounds: PromptBounds) -> bytes:
    given = body.input()
    assert not isinstance(given, EncodedPrompt), "bodies have prompts that nobody has encoded"
    with _named(body):
        tokens = encode_prompt(tokenizer, given, bounds)
    told: dict[str, Any] = {"count": len(tokens), "max_model_len": bounds.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        texts = {token: text_of(tokenizer, (token,)) for token in set(tokens)}
        told["token_strs"] = [texts[token] for token in tokens]
    return json.dumps(told).encode()


def read_detokenize(tokenizer: Tokenizer, raw: bytes, bounds: PromptBounds) -> tuple[str, bytes]:
    """The model that is asked for, and the answer as JSON."""
    body = _parsed(DetokenizeBody, raw)
    return body.model or "", detokenized(tokenizer, body, bounds)


def detokenized(tokenizer: Tokenizer, body: DetokenizeBody, bounds: PromptBounds) -> bytes:
    if len(body.tokens) > bounds.context_length:
        rule = f"the model's context has {bounds.context_length}"
        raise InvalidRequest("tokens", f"has {len(body.tokens)} token ids; {rule}")
    wrong = next((token for token in body.tokens if not 0 <= token < bounds.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest("tokens", f"has {wrong}; this model's token ids end at {bounds.vocab_size - 1}")
    return json.dumps({"prompt": text_of(tokenizer, body.tokens)}).encode()


def _parsed(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """As the application reads small bodies."""
    try:
        given = json.loads(raw)
    except json.JSONDecodeError as error:
        raise Malformed.no_json(error.msg) from None
    except (ValueError, RecursionError):  # another coding, a number of too many digits, too deep
        raise Malformed.no_json("it cannot be read") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise Malformed.of(errors, given) from None


@contextmanager
def _named(body: Body) -> Iterator[None]:
    """What is wrong has the name that was sent."""
    try:
        with body.named():
            yield
    except Unservable as error:
        raise Unservable(error.message, body.sent.get(error.field, error.field)) from None


def _encoded(tokenizer: Tokenizer, prompt: GenerationInput, bounds: PromptBounds, echo: bool) -> EncodedPrompt:
    assert not isinstance(prompt, EncodedPrompt), "bodies have prompts that nobody has encoded"
    encoded = encode_apart(tokenizer, prompt, bounds)
    if not echo or not encoded.packed:
        return encoded
    return replace(encoded, text=prompt.text if isinstance(prompt, TextPrompt) else text_of(tokenizer, encoded.tokens))
