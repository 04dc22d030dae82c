"""The parts of an answer: content, reasoning, and tool calls. Knows no format and no wire."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Schemas = Mapping[str, Any]  # the JSON schema of each tool's parameters, by the tool's name


@dataclass(slots=True)
class CallDelta:
    """Call number `index` begins, if there is a name, and its arguments, JSON as text, go on."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class AnswerDelta:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def joined(self, later: "AnswerDelta") -> "AnswerDelta":
        """Both, as one. The parts of a call are joined too."""
        calls = [CallDelta(each.index, each.name, each.arguments) for each in self.calls]
        for each in later.calls:
            if each.name:
                calls.append(each)
            else:
                calls[-1].arguments += each.arguments
        return AnswerDelta(self.content + later.content, self.reasoning + later.reasoning, calls)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerOutput:
    """Collects what parsers find. Owned by an `AnswerParser`.

    White space before reasoning, and before the content that follows reasoning or a call, belongs to neither. An answer
    of white space only is content.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        """`max_calls`: what follows them is dropped."""
        self.num_calls = 0
        self._max_calls = max_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[int, str, list[str]]] = []  # index, name, parts of the arguments
        self._space: list[str] = []  # that the answer begins with
        self._part = ""  # the one that the latest text belongs to
        self._has_reasoning = False
        self._is_full = False

    def take(self) -> AnswerDelta:
        """What was added since the last call."""
        calls = [CallDelta(index, name, "".join(parts)) for index, name, parts in self._calls]
        delta = AnswerDelta("".join(self._content), "".join(self._reasoning), calls)
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def end(self) -> None:
        if not self._part:
            self._content += self._space

    def content(self, text: str) -> None:
        if self._part not in ("", "content"):
            text = text.lstrip()
        if not text or self._is_full:
            return
        if not self._part:
            self._space.append(text)
            if text.isspace():
                return
            text = "".join(self._space)
        self._part = "content"
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        if self._is_full:
            return
        self._part = "reasoning"
        text = text if self._has_reasoning else text.lstrip()
        self._has_reasoning = self._has_reasoning or bool(text)
        self._reasoning.append(text)

    def begin(self, name: str) -> None:
        """A call of this tool begins."""
        self._is_full = self._is_full or self.num_calls == self._max_calls
        if not self._is_full:
            self._part = "call"
            self._calls.append((self.num_calls, name, []))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the latest call's arguments."""
        if not text or self._is_full:
            return
        if not self._calls:
            self._calls.append((self.num_calls - 1, "", []))
        self._calls[-1][2].append(text)
