"""Replies of OpenAI's completions and chat: a list of choices, whole or as chunks of a stream. Pure, except for the
tokenizer. A choice is one answer to one prompt.
"""

import codecs
import secrets
import string
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from cluster.frontend.http.bodies import Generation
from cluster.frontend.http.failures import Failure
from cluster.frontend.http.wire import Usage
from cluster.frontend.text import TextDelta, TextEnd, Tokenizer, text_from
from cluster.frontend.tools.answer import AnswerDelta
from cluster.frontend.tools.formats import AnswerParser
from workers.request import FinishReason, TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity
FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # of a call: Mistral's templates take no other

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers repeat."""

    text: str
    tokens: tuple[int, ...]


class OpenAIWire(ABC):
    """A `Wire`, which remembers what was sent. `name`: of the request."""

    prefix: ClassVar[str]  # of ids
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, name: str, model: str, body: Generation, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = body.wanted_logprobs is not None
        self._include_usage = body.include_usage
        self._usage_in_chunks = body.usage_in_chunks
        self._fields = {
            "id": f"{self.prefix}-{name}",
            "object": self.chunk_kind if body.stream else self.whole_kind,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + msgspec.json.encode(self._fields)[:-1] + b',"choices":['

    @abstractmethod
    def _whole(self, index: int, answer: TextDelta, finish: FinishReason) -> Choice:
        """A whole answer."""

    @abstractmethod
    def _part(self, index: int, delta: TextDelta) -> Choice | None:
        """New text or tokens; None: there is nothing to tell yet."""

    @abstractmethod
    def _end(self, index: int, finish: FinishReason) -> Choice:
        """The last part of an answer."""

    def answer(self, index: int, text: TextDelta, end: TextEnd) -> bytes:
        return msgspec.json.encode(self._whole(index, text, end.finish))

    def document(self, answers: Sequence[bytes], usage: Usage) -> bytes:
        choices = [msgspec.Raw(each) for each in answers]
        return msgspec.json.encode(self._fields | {"choices": choices, "usage": usage.json})

    def begin(self, usage: Usage) -> bytes:
        return b""

    def part(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """Tokens that end inside a character or a possible stop string have no text."""
        if not (delta.text or delta.logprobs or delta.prompt_logprobs or self._usage_in_chunks):
            return b""
        choice = self._part(index, delta)
        if choice is None and self._usage_in_chunks:
            choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        return b"" if choice is None else self._chunk(choice, usage)

    def end(self, index: int, end: TextEnd, usage: Usage) -> bytes:
        return self._chunk(self._end(index, end.finish), usage)

    def last(self, usage: Usage) -> bytes:
        whole = self._head + b'],"usage":' + msgspec.json.encode(usage.json) + b"}\n\n" if self._include_usage else b""
        return whole + b"data: [DONE]\n\n"

    def failed(self, failure: Failure) -> bytes:
        return b"event: error\ndata: " + failure.body + b"\n\n"

    def _chunk(self, choice: Choice, usage: Usage) -> bytes:
        head = self._head + msgspec.json.encode(choice)
        if not self._include_usage:
            return head + b"]}\n\n"
        counted: dict[str, Any] | None = usage.json if self._usage_in_chunks else None
        return head + b'],"usage":' + msgspec.json.encode(counted) + b"}\n\n"


class CompletionWire(OpenAIWire):
    """`echoes`: the prompts, if the answers repeat them. Each prompt has as many answers as the body asks for."""

    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self, name: str, model: str, body: Generation, tokenizer: Tokenizer, echoes: Sequence[Echo] = ()
    ) -> None:
        super().__init__(name, model, body, tokenizer)
        self._offsets: defaultdict[int, int] = defaultdict(int)
        self._characters: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")("replace")
        )
        self._echoes = echoes
        self._n = body.n or 1
        self._echoed: set[int] = set()
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}  # by prompt; its first answer brings them

    def _whole(self, index: int, answer: TextDelta, finish: FinishReason) -> Choice:
        return self._part(index, answer) | {"finish_reason": FINISH[finish]}

    def _part(self, index: int, delta: TextDelta) -> Choice:
        echo, scores = self._echo(index, delta)
        logprobs = None
        if self._has_logprobs:
            tokens, scored = (*echo.tokens, *delta.tokens), (*scores, *delta.logprobs)
            logprobs = self._logprobs_json(index, tokens, scored)
        return {"index": index, "text": echo.text + delta.text, "logprobs": logprobs, "finish_reason": None}

    def _end(self, index: int, finish: FinishReason) -> Choice:
        echo, _ = self._echo(index, TextDelta("", (), 0))
        return {"index": index, "text": echo.text, "logprobs": None, "finish_reason": FINISH[finish]}

    def _echo(self, index: int, delta: TextDelta) -> tuple[Echo, Sequence[TokenLogprobs | None]]:
        """The prompt and the logprobs of its tokens for the first part of an answer; empty for later parts."""
        if not self._echoes or index in self._echoed:
            return NOTHING, ()
        self._echoed.add(index)
        prompt = index // self._n
        scores = self._scores.setdefault(prompt, delta.prompt_logprobs)
        return self._echoes[prompt], (None, *scores)

    def _logprobs_json(
        self, index: int, tokens: Sequence[int], scored: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """`scored`: None for a prompt's first token, which has no logprob."""
        pieces = [text_from(self._tokenizer, (token,)) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._characters[index].decode(self._tokenizer.token_bytes(token)))
        return {
            "tokens": pieces,
            "token_logprobs": [each and _finite(each.chosen) for each in scored],
            "top_logprobs": [
                each and {text_from(self._tokenizer, (token,)): _finite(value) for token, value in each.top}
                for each in scored
            ],
            "text_offset": offsets,
        }


NOTHING = Echo("", ())


class ChatWire(OpenAIWire):
    """`make_parser`: for one answer; None: all its text is content."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        name: str,
        model: str,
        body: Generation,
        tokenizer: Tokenizer,
        make_parser: Callable[[], AnswerParser] | None,
    ) -> None:
        super().__init__(name, model, body, tokenizer)
        self._make_parser = make_parser
        self._parsers: dict[int, AnswerParser] = {}  # of answers that stream
        self._begun: set[int] = set()

    def _whole(self, index: int, answer: TextDelta, finish: FinishReason) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []}
        reason = FINISH[finish]
        if self._make_parser is not None:
            parser = self._make_parser()
            whole = parser.push(answer.text).joined(parser.flush())
            calls = [_call_json(each.index, each.name, each.arguments) for each in whole.calls]
            message["content"] = whole.content or (None if calls else "")
            message |= {"reasoning_content": whole.reasoning} if whole.reasoning else {}
            message |= {"tool_calls": [_without_index(each) for each in calls]} if calls else {}
            reason = _reason(parser, finish)
        return {"index": index, "message": message, "logprobs": self._logprobs_json(answer), "finish_reason": reason}

    def _part(self, index: int, delta: TextDelta) -> Choice | None:
        new = self._parsed(index, delta)
        logprobs = self._logprobs_json(delta)
        if new is None and not logprobs:
            return None
        return {"index": index, "delta": self._role(index) | (new or {}), "logprobs": logprobs, "finish_reason": None}

    def _end(self, index: int, finish: FinishReason) -> Choice:
        reason, new = FINISH[finish], {}
        if self._make_parser is not None:
            parser = self._parser(index)
            new, reason = _delta_json(parser.flush()), _reason(parser, finish)
        return {"index": index, "delta": self._role(index) | new, "logprobs": None, "finish_reason": reason}

    def _parsed(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        if self._make_parser is None:
            return {"content": delta.text}
        found = self._parser(index).push(delta.text)
        return _delta_json(found) if found else None

    def _parser(self, index: int) -> AnswerParser:
        if index not in self._parsers:
            assert self._make_parser is not None, "callers have checked"
            self._parsers[index] = self._make_parser()
        return self._parsers[index]

    def _role(self, index: int) -> dict[str, str]:
        """The role for the first chunk of an answer; empty for later chunks."""
        if index in self._begun:
            return {}
        self._begun.add(index)
        return {"role": "assistant", "content": ""}

    def _logprobs_json(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return {
            "content": [
                self._one(token, each.chosen) | {"top_logprobs": self._top(each)}
                for token, each in zip(delta.tokens, delta.logprobs, strict=True)
            ],
            "refusal": None,
        }

    def _top(self, logprobs: TokenLogprobs) -> list[dict[str, Any]]:
        return [self._one(token, value) for token, value in logprobs.top]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = text_from(self._tokenizer, (token,))
        return {"token": text, "logprob": _finite(logprob), "bytes": list(self._tokenizer.token_bytes(token))}


def _delta_json(delta: AnswerDelta) -> dict[str, Any]:
    calls = [_call_json(each.index, each.name, each.arguments) for each in delta.calls]
    found = {"content": delta.content, "reasoning_content": delta.reasoning, "tool_calls": calls}
    return {name: value for name, value in found.items() if value}


def _call_json(index: int, name: str, arguments: str) -> dict[str, Any]:
    """`name`: empty, if the call has begun before."""
    if not name:
        return {"index": index, "function": {"arguments": arguments}}
    call_id = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


def _reason(parser: AnswerParser, finish: FinishReason) -> str:
    return "tool_calls" if parser.num_calls and finish is not FinishReason.LENGTH else FINISH[finish]


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
