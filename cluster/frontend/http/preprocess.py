"""The functions that `cluster.frontend.preprocessing` runs for HTTP: they parse and tokenize large bodies.

Pure, except for the tokenizer. The results are small: a body's fields without its prompts, and the prompts' token ids.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cluster.frontend.http.bodies import (
    CompletionBody,
    DetokenizeBody,
    Generation,
    MalformedBody,
)
from cluster.frontend.http.chat_body import Item, TokenizeBody
from cluster.frontend.http.embeddings import EmbeddingsBody
from cluster.frontend.http.messages_body import MessagesBody
from cluster.frontend.http.responses_body import History, ResponsesBody
from cluster.frontend.text import (
    EncodedPrompt,
    PromptBounds,
    RawPrompt,
    TextPrompt,
    Tokenizer,
    encode_packed,
    encode_prompt,
    text_from,
)
from workers.errors import InvalidRequest

MAX_FIELD_BYTES = 64 << 10  # of a field other than the prompts; the longest valid lists of stops and biases fit
REQUIRED = {"messages"}  # stays in the body, as an empty list

AnyBody = TypeVar("AnyBody", bound=BaseModel)


class AnyModel(BaseModel):
    """The only field that all bodies have."""

    model: str | None = None


@dataclass(frozen=True, slots=True)
class PreprocessedBody:
    """`fields`: the arguments of the body's class, without its prompts. `prompts`: these, encoded. `items`: those of a
    response's request, as JSON.
    """

    fields: dict[str, Any]
    prompts: tuple[EncodedPrompt, ...]
    items: bytes = b""


def read_model(tokenizer: Tokenizer, raw: bytes) -> str:
    """The model that a body of any kind names. Raises `MalformedBody`."""
    return _parse(AnyModel, raw).model or ""


def read_generation(
    tokenizer: Tokenizer,
    kind: type[Generation | MessagesBody | EmbeddingsBody],
    raw: bytes,
    bounds: PromptBounds,
    defaults: Mapping[str, Any],
) -> PreprocessedBody:
    """Raises the gateway's errors for prompts, and `MalformedBody`."""
    body = _parse(kind, raw)
    asked = body.chat if isinstance(body, MessagesBody) else body
    prompts = asked.prompts()
    asked.sampling(defaults)  # refuses lists that are too long before they are sent on
    echo = isinstance(asked, CompletionBody) and bool(asked.echo)
    with asked.client_errors():
        encoded = tuple(_encode(tokenizer, prompt, bounds, echo) for prompt in prompts)
    left_out = {"prompt", "input", "messages", "system", "chat_template_kwargs"}
    emptied: dict[str, Any] = {name: [] for name in REQUIRED & kind.model_fields.keys()}
    fields = body.model_dump(exclude_unset=True, exclude=left_out) | emptied
    return PreprocessedBody(_bounded(fields), encoded)


def read_previous_id(tokenizer: Tokenizer, raw: bytes) -> str | None:
    """The response that this request continues. Raises `MalformedBody` and `InvalidRequest`."""
    return _parse(ResponsesBody, raw).previous_response_id


def read_response(
    tokenizer: Tokenizer, raw: bytes, history: History, bounds: PromptBounds, defaults: Mapping[str, Any]
) -> PreprocessedBody:
    """Raises the gateway's errors for prompts, and `MalformedBody`."""
    body = _parse(ResponsesBody, raw)
    chat = body.chat_after(items_of(history))
    chat.sampling(defaults)
    with chat.client_errors():
        encoded = tuple(_encode(tokenizer, prompt, bounds, echo=False) for prompt in chat.prompts())
    fields = body.model_dump(exclude_unset=True, exclude={"input"}) | {"input": ""}
    return PreprocessedBody(_bounded(fields), encoded, json.dumps(body.items).encode())


def _bounded(fields: dict[str, Any]) -> dict[str, Any]:
    """Raises `InvalidRequest` for a field that is too large; tools and instructions have other limits."""
    for name, value in fields.items():
        if name not in ("tools", "instructions") and len(pickle.dumps(value)) > MAX_FIELD_BYTES:
            raise InvalidRequest(name, f"has more than {MAX_FIELD_BYTES >> 10} KiB; send less")
    return fields


def items_of(history: History) -> list[Item]:
    return [item for each in history for item in json.loads(each)]


def read_tokens(
    tokenizer: Tokenizer, kind: type[TokenizeBody | DetokenizeBody], raw: bytes, bounds: PromptBounds
) -> tuple[str, bytes]:
    """The requested model, and the response body."""
    body = _parse(kind, raw)
    if isinstance(body, TokenizeBody):
        return body.model or "", tokenize(tokenizer, body, bounds)
    return body.model or "", detokenize(tokenizer, body, bounds)


def tokenize(tokenizer: Tokenizer, body: TokenizeBody, bounds: PromptBounds) -> bytes:
    """The response body."""
    prompt = body.input()
    with body.client_errors():
        tokens = encode_prompt(tokenizer, prompt, bounds)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": bounds.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        texts = {token: text_from(tokenizer, (token,)) for token in set(tokens)}
        answer["token_strs"] = [texts[token] for token in tokens]
    return json.dumps(answer).encode()


def detokenize(tokenizer: Tokenizer, body: DetokenizeBody, bounds: PromptBounds) -> bytes:
    if len(body.tokens) > bounds.context_length:
        rule = f"the model's context has {bounds.context_length}"
        raise InvalidRequest("tokens", f"has {len(body.tokens)} token ids; {rule}")
    wrong = next((token for token in body.tokens if not 0 <= token < bounds.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest("tokens", f"has {wrong}; this model's token ids end at {bounds.vocab_size - 1}")
    return json.dumps({"prompt": text_from(tokenizer, body.tokens)}).encode()


def _parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """The body, with the same errors as FastAPI's parser has for small bodies."""
    try:
        given = json.loads(raw)
    except json.JSONDecodeError as error:
        raise MalformedBody.not_json(error.msg) from None
    except (ValueError, RecursionError):  # wrong encoding, a number with too many digits, nested too deep
        raise MalformedBody.not_json("it cannot be read") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise MalformedBody.of(errors, given) from None


def _encode(tokenizer: Tokenizer, prompt: RawPrompt, bounds: PromptBounds, echo: bool) -> EncodedPrompt:
    encoded = encode_packed(tokenizer, prompt, bounds)
    if not echo or not encoded.packed:
        return encoded
    text = prompt.text if isinstance(prompt, TextPrompt) else text_from(tokenizer, encoded.tokens)
    return replace(encoded, text=text)
