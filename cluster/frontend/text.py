"""Prompts to token ids, and token ids to text: whole characters only, and stop strings across token boundaries.

Pure, except for the tokenizer that callers pass. Knows no cluster and no wire format.
"""

import json
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.events import Delta, Unservable
from diptych.events import TextDelta as TextDelta
from diptych.events import TextEvent as TextEvent
from workers.errors import InvalidRequest, PromptTooLong
from workers.request import FinishReason, Grammar, SamplingParams

MAX_DEPTH = 64  # levels of nesting in a client's JSON


class Detokenizer(Protocol):
    """Detokenizes one answer; `workers.model.tokenizer.IncrementalDetokenizer` documents the methods."""

    def push(self, tokens: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """The methods of a model's tokenizer that a gateway uses; `workers.model.tokenizer.ModelTokenizer` documents them.

    Raises `InvalidRequest`, and `PromptTooLong` for a text that cannot fit into the model's context.
    """

    @property
    def longest_text_bytes(self) -> int | None: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def info(self) -> Mapping[str, Any]: ...
    @property
    def special_ids(self) -> Mapping[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = ...,
    ) -> Sequence[int]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def check_grammar(self, grammar: Grammar) -> Grammar: ...
    def load_grammars(self) -> None: ...
    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> Detokenizer: ...


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text. `add_special_tokens`: add those that the tokenizer puts around a text, such as BOS.

    `apply_chat_template`: the text is a user's message. A model without a template continues it as it is.
    """

    text: str
    add_special_tokens: bool = True
    apply_chat_template: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode(errors="surrogatepass"))

    def encode(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        if not self.text:
            raise InvalidRequest("prompt.text", "is empty; give at least one character")
        if self.apply_chat_template and tokenizer.has_chat_template:
            return tuple(tokenizer.apply_chat_template([{"role": "user", "content": self.text}]))
        return tuple(tokenizer.encode(self.text, add_special_tokens=self.add_special_tokens))


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    tokens: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.tokens)

    def encode(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        if not self.tokens:
            raise InvalidRequest("prompt.tokens", "is empty; give at least one token id")
        return self.tokens


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """(role, content) messages, rendered by the model's chat template.

    `tools`: JSON objects that describe functions, in the template's format. `template_kwargs`: a JSON object with
    further variables of the template; empty: none. `message_fields`: a JSON object for each message, with its fields
    besides role and content; empty: no message has any.
    """

    messages: tuple[tuple[str, str], ...]
    tools: tuple[str, ...] = ()
    template_kwargs: str = ""
    message_fields: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        messages = (role + content for role, content in self.messages)
        texts = (*messages, *self.tools, self.template_kwargs, *self.message_fields)
        return sum(len(text.encode(errors="surrogatepass")) for text in texts)

    def encode(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        if not self.messages:
            raise InvalidRequest("prompt.chat", "has no messages; give at least one of role user")
        for index, (role, _) in enumerate(self.messages):
            if not role:
                raise InvalidRequest(f"prompt.chat.messages[{index}].role", "is empty; give a role such as user")
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in self.messages]
        for message, fields in zip(messages, self.message_fields, strict=False):
            message |= json.loads(fields)
        tools = [_json_object(f"prompt.chat.tools[{index}]", text) for index, text in enumerate(self.tools)]
        variables = _json_object("chat_template_kwargs", self.template_kwargs or "{}")
        return tuple(tokenizer.apply_chat_template(messages, tools=tools, template_kwargs=variables))


def _json_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidRequest(field, f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "is not a JSON object")
    check_depth(field, value)
    return value


def check_depth(field: str, value: object) -> None:
    """Raises `InvalidRequest` for JSON that is nested more than `MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return
    raise _too_deep(field)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep(field: str) -> InvalidRequest:
    return InvalidRequest(field, f"is nested more than {MAX_DEPTH} levels deep; flatten it")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt that was encoded and checked in another process. `text`: for answers that repeat it (`echo`)."""

    packed: bytes  # token ids, four bytes each; empty if there are more than the model's context holds
    num_tokens: int
    text: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(array("I", self.packed))


RawPrompt = TextPrompt | TokenPrompt | ChatPrompt
PromptInput = RawPrompt | EncodedPrompt


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """Limits of prompts."""

    max_bytes: int
    context_length: int
    vocab_size: int
    max_model_len: int  # the part of the context that the current workers can hold

    def too_long(self, least_tokens: int) -> Unservable:
        """The error for a prompt of at least this many tokens, worded as by OpenAI's API."""
        asked = f"you requested at least {least_tokens + 1} tokens ({least_tokens} in the prompt, 1 in the completion)"
        limit = f"This model's maximum context length is {self.context_length} tokens"
        return Unservable(f"{limit}. However, {asked}; shorten it")

    def check_tokens(self, field: str, tokens: Sequence[int]) -> None:
        """Raises `InvalidRequest` for ids outside of the model's vocabulary."""
        size = self.vocab_size
        if tokens and (max(tokens) >= size or min(tokens) < 0):
            index = next(index for index, token in enumerate(tokens) if not 0 <= token < size)
            raise InvalidRequest(f"{field}[{index}]", f"is {tokens[index]}; this model's token ids end at {size - 1}")


def encode_prompt(tokenizer: Tokenizer, prompt: RawPrompt, bounds: PromptBounds) -> tuple[int, ...]:
    """A prompt's token ids. Raises `InvalidRequest`, and `Unservable` if the model's context cannot hold them."""
    num_bytes = prompt.num_bytes
    if num_bytes > bounds.max_bytes:
        raise InvalidRequest("prompt", f"has {num_bytes} bytes; this gateway takes at most {bounds.max_bytes}")
    try:
        tokens = prompt.encode(tokenizer)
    except PromptTooLong as error:
        raise bounds.too_long(error.least_tokens) from None
    if not tokens:
        raise InvalidRequest("prompt", "encodes to no tokens; give more text")
    bounds.check_tokens("prompt.tokens", tokens)
    return tokens


def encode_packed(tokenizer: Tokenizer, prompt: RawPrompt, bounds: PromptBounds) -> EncodedPrompt:
    """Like `encode_prompt`, in a compact form for the pipe between processes."""
    tokens = encode_prompt(tokenizer, prompt, bounds)
    fits = len(tokens) <= bounds.context_length
    return EncodedPrompt(array("I", tokens).tobytes() if fits else b"", len(tokens))


def text_from(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of these tokens, including special tokens."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    return detokenizer.push(tokens) + detokenizer.flush()


@dataclass(frozen=True, slots=True)
class TextEnd:
    """One answer has ended: no delta with its index follows. Other answers of the request may still run.

    `stop`: the stop string that has ended it, if one has.
    """

    finish: FinishReason
    index: int = 0
    stop: str = ""


GatewayEvent = TextEvent | TextEnd


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces; of several that end together, the longest.

        text so far      … the answer is 42.\\n\\nQu
        stop             \\n\\nQuestion
        emitted          … the answer is 42.          held back: \\n\\nQu

    Holds back the longest suffix of the text that is a prefix of a stop string, so no part of a stop string is emitted.
    Owned by one `TextStream`. `found`: the one that was found.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.found = ""
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> tuple[str, bool]:
        """(text to emit, whether a stop string was found). If not `armed`, a stop string that ends here is text."""
        text = self._held + piece
        end_start = self._first_stop(text) if armed else None
        if end_start is not None:
            end, start = end_start
            self._held, self.found = "", text[start:end]
            return text[: end if self._include else start], True
        keep = self._partial_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The held back text, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """(end, start) of the first stop string that ends in the new piece. Earlier ones came while not armed."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found, default=None)

    def _partial_length(self, text: str) -> int:
        """Length of the longest suffix that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Turns the token deltas of one answer into text deltas. `stopped`: a stop string has ended it.

    A stop string or stop token counts if it is complete at output token `min_tokens` or later. A stop token has no
    text unless `include_stop_in_output` is set. Owned by the request's pump.
    """

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, index: int = 0) -> None:
        self._detokenizer = detokenizer
        self._index = index
        self._stops = StopStrings(sampling.stop, sampling.include_stop_in_output)
        self._has_stops = bool(sampling.stop)
        self._silent = frozenset(() if sampling.include_stop_in_output else sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self.num_tokens = 0
        self.stopped = False

    @property
    def stop(self) -> str:
        """The stop string that has ended it; empty: none has."""
        return self._stops.found

    def push(self, delta: Delta) -> TextDelta | None:
        """The text that these tokens complete. Drops tokens after the one that completes a stop string."""
        if self.stopped:
            return None
        if not self._has_stops:
            text = self._text(delta.tokens)
            return TextDelta(
                text, delta.tokens, delta.first_position, delta.logprobs, delta.prompt_logprobs, self._index
            )
        text = self._text_with_stops(delta.tokens)
        used = self.num_tokens - delta.first_position
        return TextDelta(
            text, delta.tokens[:used], delta.first_position, delta.logprobs[:used], delta.prompt_logprobs, self._index
        )

    def flush(self) -> TextDelta | None:
        """The remaining text, if any."""
        if self.stopped:
            return None
        text, self.stopped = self._stops.push(self._detokenizer.flush(), self.num_tokens >= self._min_tokens)
        text += self._stops.flush()
        return TextDelta(text, (), self.num_tokens, index=self._index) if text else None

    def _text(self, tokens: Sequence[int]) -> str:
        self.num_tokens += len(tokens)
        silent = tokens and tokens[-1] in self._silent and self.num_tokens >= self._min_tokens
        return self._detokenizer.push(tokens[:-1] if silent else tokens)

    def _text_with_stops(self, tokens: Sequence[int]) -> str:
        pieces = []
        for token in tokens:
            text = self._text((token,))
            piece, self.stopped = self._stops.push(text, self.num_tokens >= self._min_tokens)
            pieces.append(piece)
            if self.stopped:
                break
        return "".join(pieces)
