"""The port between a reply and an API's shape of it: one document, or server-sent events. Knows no connection. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.events import Completed
from cluster.frontend.http.failures import Failure
from cluster.frontend.text import TextDelta, TextEnd


@dataclass(slots=True)
class Usage:
    """Token counts of a request, summed over its prompts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, end: Completed) -> None:
        self.prompt_tokens += end.prompt_tokens
        self.completion_tokens += end.completion_tokens
        self.cached_tokens += end.cached_tokens

    @property
    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


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
