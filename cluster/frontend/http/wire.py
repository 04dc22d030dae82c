"""The bytes of a reply: one document, or server-sent events. Pure."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from cluster.frontend.http.failures import Failure
from cluster.frontend.http.formats import ChatFormat, Choice, CompletionFormat, Usage
from cluster.frontend.text import TextDelta, TextEnd


class Wire(Protocol):
    """An API's shape of one reply, which owns it. An answer is known by its `index`."""

    def answer(self, index: int, text: TextDelta, end: TextEnd) -> bytes:
        """A whole answer, for `document`."""
        ...

    def document(self, answers: Sequence[bytes], usage: Usage) -> bytes: ...

    def begin(self, usage: Usage) -> bytes:
        """Events before all others."""
        ...

    def part(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """Events for new text or tokens; empty: there is nothing to tell yet. `usage`: so far."""
        ...

    def end(self, index: int, end: TextEnd, usage: Usage) -> bytes:
        """Events for the end of an answer."""
        ...

    def last(self, usage: Usage) -> bytes:
        """Events after all others."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """Events for an error after the first event."""
        ...


class OpenAIWire:
    """Completions and chat: a list of choices."""

    def __init__(
        self,
        form: CompletionFormat | ChatFormat,
        name: str,
        model: str,
        *,
        stream: bool,
        include_usage: bool = False,
        usage_in_chunks: bool = False,
    ) -> None:
        """`name`: of the request."""
        self._format = form
        self._include_usage = include_usage
        self._usage_in_chunks = usage_in_chunks
        self._fields = {
            "id": f"{form.prefix}-{name}",
            "object": form.chunk_kind if stream else form.whole_kind,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + msgspec.json.encode(self._fields)[:-1] + b',"choices":['

    def answer(self, index: int, text: TextDelta, end: TextEnd) -> bytes:
        return msgspec.json.encode(self._format.whole(index, text, end.finish))

    def document(self, answers: Sequence[bytes], usage: Usage) -> bytes:
        choices = [msgspec.Raw(each) for each in answers]
        return msgspec.json.encode(self._fields | {"choices": choices, "usage": usage.json})

    def begin(self, usage: Usage) -> bytes:
        return b""

    def part(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """Tokens that end inside a character or a possible stop string have no text."""
        if not (delta.text or delta.logprobs or delta.prompt_logprobs or self._usage_in_chunks):
            return b""
        choice = self._format.part(index, delta)
        if choice is None and self._usage_in_chunks:
            choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        return b"" if choice is None else self._chunk(choice, usage)

    def end(self, index: int, end: TextEnd, usage: Usage) -> bytes:
        return self._chunk(self._format.end(index, end.finish), usage)

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
