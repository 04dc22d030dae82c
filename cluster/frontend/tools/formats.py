"""The formats of tool calls and reasoning, by the names that vLLM gives its parsers. Pure.

A format is recognized by the markers in a model's chat template; a cluster file may name another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cluster.frontend.tools.answer import AnswerDelta, AnswerOutput, Schemas
from cluster.frontend.tools.readers import Reader, tagged_json
from cluster.frontend.tools.text_input import SPACE, TextInput, Wait


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls:

        begin open{...}close between open{...}close end

    `open` contains NAME. `signs`: texts of which a chat template with this format has all.
    """

    signs: tuple[str, ...]
    read: Reader
    open: str
    close: str
    between: str = "\n"
    begin: str = ""
    end: str = ""
    markers: tuple[str, ...] = ()  # special tokens in some tokenizers


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning comes first, between `start` and `end`; a prompt may have the start."""

    signs: tuple[str, ...]
    start: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Whether this prompt, or its end, leaves reasoning begun."""
        return prompt.rfind(self.start) > prompt.rfind(self.end)

    def read(self, text: TextInput, output: AnswerOutput) -> Wait[None]:
        """Reasoning, if the answer begins with it."""
        space = yield from text.run(SPACE)
        if (yield from text.literal(self.start)):
            yield from self.read_open(text, output)
        else:
            output.content(space)

    def read_open(self, text: TextInput, output: AnswerOutput) -> Wait[None]:
        """Reasoning that has begun."""
        yield from text.until((self.end,), output.reasoning)


CALLS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        ("<tool_call>",),
        tagged_json("<tool_call>", "</tool_call>"),
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
        markers=("<tool_call>", "</tool_call>"),
    ),
}
THINK = ReasoningFormat(("</think>",), "<think>", "</think>")
REASONING: Mapping[str, ReasoningFormat] = dict.fromkeys(("deepseek_r1", "qwen3", "glm45"), THINK)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes answers. None: it calls no tools, or does not reason apart."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None

    @property
    def markers(self) -> tuple[str, ...]:
        """What the parser needs to see, even where it is a special token."""
        found = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        return found if self.calls is None else (*found, *self.calls.markers)


def answer_format(template: str, calls: str, reasoning: str) -> AnswerFormat:
    """`calls` and `reasoning`: a name, none, or auto, which asks the chat template."""
    return AnswerFormat(_named(CALLS, calls, template), _named(REASONING, reasoning, template))


class AnswerParser:
    """Parses one answer as it comes; its parts do not depend on how its text was cut. Owned by its reply."""

    def __init__(
        self, form: AnswerFormat, schemas: Schemas, *, is_reasoning: bool = False, most_calls: int | None = None
    ) -> None:
        """`form` without calls: calls are text. `is_reasoning`: the prompt has begun the reasoning."""
        self._text = TextInput()
        self._output = AnswerOutput(most_calls)
        self._reading = self._read(form, schemas, is_reasoning)
        next(self._reading)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._output.num_calls

    def push(self, piece: str) -> AnswerDelta:
        """What is known with this piece."""
        self._text.append(piece)
        next(self._reading, None)
        return self._output.take()

    def flush(self) -> AnswerDelta:
        """The rest, at the end of the answer."""
        self._text.end()
        next(self._reading, None)
        self._output.end()
        return self._output.take()

    def _read(self, form: AnswerFormat, schemas: Schemas, is_reasoning: bool) -> Wait[None]:
        if form.reasoning is not None:
            yield from (form.reasoning.read_open if is_reasoning else form.reasoning.read)(self._text, self._output)
        if form.calls is not None:
            yield from form.calls.read(self._text, self._output, schemas)
        yield from self._text.rest(self._output.content)


F = TypeVar("F", CallFormat, ReasoningFormat)


def _named(known: Mapping[str, F], name: str, template: str) -> F | None:
    if name != "auto":
        return known.get(name)
    return next((each for each in known.values() if all(sign in template for sign in each.signs)), None)
