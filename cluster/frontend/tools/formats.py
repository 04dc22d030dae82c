"""The formats of tool calls and reasoning, by the names that vLLM gives its parsers. Pure.

A format is recognized by the markers in a model's chat template; a cluster file may name another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cluster.frontend.tools.answer import AnswerDelta, AnswerOutput, Schemas
from cluster.frontend.tools.text_input import SPACE, TextInput, Wait
from cluster.frontend.tools.tool_parsers import (
    TaggedPairs,
    ToolParser,
    bare_json,
    deepseek,
    gemma,
    harmony,
    mistral,
    pythonic,
    tagged_json,
)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments that are no JSON: `pair` with KEY and VALUE for each, `between` two of them.

    A text as a value is between two `quote`; if that is empty, it goes on to what follows it; None: it is JSON.
    `is_nested`: objects and lists are written in this way, too.
    """

    pair: str
    between: str
    quote: str | None = None
    is_nested: bool = False


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls:

        begin open arguments close between open arguments close end

    `open` contains NAME. `between` None: one call only. `arguments` None: they are JSON. `signs`: texts of which a chat
    template with this format has all. `markers`: what may be a special token.
    """

    signs: tuple[str, ...]
    read: ToolParser
    open: str
    close: str
    between: str | None = "\n"
    begin: str = ""
    end: str = ""
    markers: tuple[str, ...] = ()
    arguments: Pairs | None = None

    @property
    def marker(self) -> str:
        """What begins calls anywhere in an answer; empty: they are all of it."""
        return self.markers[0] if (self.begin + self.open).startswith(self.markers[0]) else ""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning comes first, between `start` and `end`; a prompt may have the start. `after`: what follows the end.

    `channels` reads all of an answer instead: reasoning is anywhere in it.
    """

    signs: tuple[str, ...]
    start: str
    end: str
    after: str = ""
    channels: ToolParser | None = None
    markers: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Whether this prompt, or its end, leaves reasoning begun."""
        return self.channels is None and prompt.rfind(self.start) > prompt.rfind(self.end)

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


CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
DEEPSEEK = tuple(f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
BEGIN, CALL, SEP, CALL_END, END = DEEPSEEK
# The first whose signs a template has.
CALLS: Mapping[str, CallFormat] = {
    "openai": CallFormat(
        ("<|channel|>", "<|message|>"),
        harmony,
        " to=functions.NAME<|channel|>commentary json<|message|>",
        "",  # the model ends with <|call|>
        between=None,
        markers=CHANNELS,
    ),
    "gemma4": CallFormat(
        ("<|tool_call>", "<tool_call|>"),
        gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        "<|tool_call>call:NAME{",
        "}<tool_call|>",
        between="",
        markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
        arguments=Pairs("KEY:VALUE", ",", '<|"|>', is_nested=True),
    ),
    "functiongemma": CallFormat(
        ("<start_function_call>",),
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call>call:NAME{",
        "}<end_function_call>",
        between="",
        markers=("<start_function_call>", "<end_function_call>", "<escape>"),
        arguments=Pairs("KEY:VALUE", ",", "<escape>", is_nested=True),
    ),
    "deepseek_v3": CallFormat(
        (BEGIN, "```json"),
        deepseek(f"function {SEP}", "```json", f"``` {CALL_END}"),
        f"{CALL}function{SEP}NAME\n```json\n",
        f"\n```{CALL_END}",
        begin=BEGIN,
        end=END,
        markers=DEEPSEEK,
    ),
    "deepseek_v31": CallFormat(
        (BEGIN,),
        deepseek("", SEP, CALL_END),
        f"{CALL}NAME{SEP}",
        CALL_END,
        between="",
        begin=BEGIN,
        end=END,
        markers=DEEPSEEK,
    ),
    "mistral_args": CallFormat(
        ("[TOOL_CALLS]", "[ARGS]"),
        mistral,
        "[TOOL_CALLS]NAME[ARGS]",
        "",
        between="",
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        mistral,
        '{"name": "NAME", "arguments": ',
        "}",
        between=", ",
        begin="[TOOL_CALLS][",
        end="]",
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "glm45": CallFormat(
        ("<tool_call>", "<arg_key>"),
        TaggedPairs(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>"),
        "<tool_call>NAME",
        "\n</tool_call>",
        markers=(*TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        arguments=Pairs("\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>", "", ""),
    ),
    "qwen3_coder": CallFormat(
        ("<tool_call>", "<function="),
        TaggedPairs(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function> </tool_call>"),
        "<tool_call>\n<function=NAME>",
        "\n</function>\n</tool_call>",
        markers=TOOL_CALL,
        arguments=Pairs("\n<parameter=KEY>\nVALUE\n</parameter>", "", ""),
    ),
    "hermes": CallFormat(
        ("<tool_call>", "</tool_call>", '"arguments'),
        tagged_json(*TOOL_CALL),
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
        markers=TOOL_CALL,
    ),
    "llama3_json": CallFormat(
        ('{"name": function name, "parameters": ',),
        bare_json,
        '{"name": "NAME", "parameters": ',
        "}",
        between="; ",
        markers=("<|python_tag|>",),
    ),
    "pythonic": CallFormat(
        ("func_name1(params_name1=params_value1",),
        pythonic,
        "NAME(",
        ")",
        between=", ",
        begin="[",
        end="]",
        markers=("<|python_start|>", "<|python_end|>"),
        arguments=Pairs("KEY=VALUE", ", "),
    ),
}
THINK = ReasoningFormat(("</think>",), "<think>", "</think>")
REASONING: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat(
        ("<|channel|>", "<|message|>"),
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant",
        channels=harmony,
        markers=CHANNELS,
    ),
    "gemma4": ReasoningFormat(
        ("<|channel>thought",), "<|channel>thought\n", "<channel|>", markers=("<|channel>", "<channel|>")
    ),
    "mistral": ReasoningFormat(("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]"),
    **dict.fromkeys(("deepseek_r1", "qwen3", "glm45"), THINK),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes answers. None: it calls no tools, or does not reason apart."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None

    @property
    def markers(self) -> tuple[str, ...]:
        """What the parser needs to see, even where it is a special token."""
        found = () if self.calls is None else self.calls.markers
        if self.reasoning is None:
            return found
        return (*found, *(self.reasoning.markers or (self.reasoning.start, self.reasoning.end)))

    @property
    def content_head(self) -> str:
        """What the model writes before content."""
        return "<|channel|>final<|message|>" if "<|channel|>" in self.markers else ""


def answer_format(template: str, calls: str, reasoning: str) -> AnswerFormat:
    """`calls` and `reasoning`: a name, none, or auto, which asks the chat template."""
    return AnswerFormat(_named(CALLS, calls, template), _named(REASONING, reasoning, template))


class AnswerParser:
    """Parses one answer as it comes; its parts do not depend on how its text was cut. Owned by its reply."""

    def __init__(
        self, form: AnswerFormat, schemas: Schemas, *, is_reasoning: bool = False, max_calls: int | None = None
    ) -> None:
        """`form` without calls: calls are text. `is_reasoning`: the prompt has begun the reasoning."""
        self._text = TextInput()
        self._output = AnswerOutput(max_calls)
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
        if form.reasoning is not None and form.reasoning.channels is not None:
            yield from form.reasoning.channels(self._text, self._output, {} if form.calls is None else schemas)
            return
        if form.reasoning is not None:
            yield from (form.reasoning.read_open if is_reasoning else form.reasoning.read)(self._text, self._output)
        if form.calls is not None:
            yield from form.calls.read(self._text, self._output, schemas)
        yield from self._text.rest(self._output.content)


CONTENT = partial(AnswerParser, AnswerFormat(None, None), {})  # all of an answer is content
F = TypeVar("F", CallFormat, ReasoningFormat)


def _named(known: Mapping[str, F], name: str, template: str) -> F | None:
    if name != "auto":
        return known.get(name)
    return next((each for each in known.values() if all(sign in template for sign in each.signs)), None)
