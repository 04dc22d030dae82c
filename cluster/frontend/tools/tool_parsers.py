"""Parsers of tool calls, one for each kind of syntax: from a text to content and calls.

    tagged_json   <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    bare_json     {"name": "f", "parameters": {...}}; {...}
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}], or [TOOL_CALLS]f[ARGS]{...}
    deepseek      <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
    harmony       <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    TaggedPairs   <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>
    pythonic      [f(k="v"), ...]
    gemma         <|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>

What only looked like a call is content, from its marker on. Once a call's name is known and its arguments begin, it is
a call: a client sees the arguments as they come, even if they turn out to be no JSON. Pure.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.frontend.tools.answer import AnswerOutput, Schemas
from cluster.frontend.tools.json_calls import drop, is_json, json_call, json_list, json_text, named_json
from cluster.frontend.tools.text_input import SCALAR, SPACE, TextInput, Wait

ToolParser = Callable[[TextInput, AnswerOutput, Schemas], Wait[None]]
PYTHON_TAG = "<|python_tag|>"
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
NAME = re.compile(r"[\w.-]*")
KEY = re.compile(r"[^:,{}\[\]]*")
CODE = re.compile(r"[^()\[\]{}'\"]*")
QUOTED = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
MAX_DEPTH = 64  # of values that are read by their structure


def tagged_json(start: str, end: str) -> ToolParser:
    """JSON objects with name and arguments, one or a list of them, between two markers."""

    def read(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
        while begun := (yield from text.until((start,), output.content)):
            text.attempt(begun)
            yield from text.run(SPACE)
            yield from (json_list if (yield from text.literal("[")) else json_call)(text, output)
            yield from text.run(SPACE)
            yield from text.literal(end)
            output.content(text.fail())

    return read


def bare_json(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
    """Calls are all of the answer, or follow <|python_tag|>, and name known tools: other JSON is content."""
    output.content((yield from text.run(SPACE)))
    begun = yield from text.literal(PYTHON_TAG)
    while True:
        while (yield from text.peek()) == "{":
            text.attempt(begun)
            if not (yield from json_call(text, output, schemas)):
                begun = text.fail()
                break
            begun = (yield from text.run(SPACE)) + (yield from text.literal(";"))
            begun += yield from text.run(SPACE)
        output.content(begun)
        if not (begun := (yield from text.until((PYTHON_TAG,), output.content))):
            return


def mistral(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
    while begun := (yield from text.until(("[TOOL_CALLS]",), output.content)):
        text.attempt(begun)
        yield from text.run(SPACE)
        if (yield from text.literal("[")):
            yield from json_list(text, output)
        elif name := (yield from text.run(NAME)):
            if (yield from text.literal("[CALL_ID]")):
                yield from text.run(NAME)
            yield from text.literal("[ARGS]")
            yield from named_json(text, output, name)
        output.content(text.fail())


def deepseek(before_name: str, before_arguments: str, after_arguments: str) -> ToolParser:
    """The texts around a call's name and arguments; V3 has more of them than V3.1."""

    def read(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
        markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
        while begun := (yield from text.until(markers, output.content)):
            if begun != markers[1]:
                continue
            text.attempt(begun)
            if (yield from _literals(text, before_name)):
                name = yield from text.run(NAME)
                if name and (yield from _literals(text, before_arguments)):
                    yield from named_json(text, output, name)
                    yield from _literals(text, after_arguments)
            output.content(text.fail())

    return read


def harmony(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
    """The channels of gpt-oss: analysis is reasoning, messages to functions are calls, the others content."""
    ends = ("<|end|>", "<|return|>", "<|call|>")
    heads = ("<|start|>", "<|channel|>")
    sink = output.content
    head: list[str] = []
    begun = yield from text.literal(" to=")  # the prompt has written <|start|>assistant before it
    while begun or (begun := (yield from text.until((*ends, *heads, "<|message|>"), sink))):
        sink = output.content
        if begun in ends:
            begun = ""
            continue
        head.append(begun)
        if begun != "<|message|>" and not (yield from text.until(("<|message|>",), head.append)):
            output.content("".join(head))
            return
        title = "".join(head)
        function = re.search(r"to=functions\.([\w.-]+)", title)
        if function and schemas:
            output.begin(function[1])
            yield from text.run(SPACE)
            is_json = (yield from text.peek()) == "{" and (yield from text.json_value(output.arguments))
            sink = drop if is_json else output.arguments
        elif "<|channel|>analysis" in title:
            sink = output.reasoning
        begun, head = "", []


@dataclass(frozen=True, slots=True)
class TaggedPairs:
    """Between <tool_call> and </tool_call>: the texts around the name, each key and each value.

    As models do, an answer may leave out <tool_call> before a known name, and what ends a value. Where nothing begins a
    value, what ends it stands on a line of its own if the value does.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str

    def __call__(self, text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
        begins = tuple(filter(None, ("<tool_call>", self.name[0])))
        while begun := (yield from text.until(begins, output.content)):
            text.attempt(begun)
            if begun == self.name[0] or (yield from _literals(text, self.name[0])):
                yield from text.run(SPACE)
                called = yield from text.run(NAME)
                is_call = called in schemas or (called and begun != self.name[0])
                if is_call and (yield from _literals(text, self.name[1])):
                    yield from text.run(SPACE)
                    if (yield from text.literal(self.key[0])):
                        yield from self._pairs(text, output, called, schemas.get(called) or {})
                    elif (yield from _literals(text, self.end)):
                        _whole(text, output, called, "{}")
            output.content(text.fail())

    def _pairs(self, text: TextInput, output: AnswerOutput, called: str, schema: Mapping[str, Any]) -> Wait[None]:
        text.commit()
        output.begin(called)
        before, ended = "{", self.key[0]
        while ended == self.key[0]:
            parts: list[str] = []
            yield from text.until((self.key[1],), parts.append)
            given, ended = yield from self._value(text)
            if not ended:
                return  # the answer was cut off
            name = "".join(parts)
            output.arguments(f"{before}{json_text(name)}: {_typed(given, name, schema)}")
            before = ", "
            if ended == self.value[1]:
                yield from text.run(SPACE)
                ended = yield from text.literal(self.key[0])
        output.arguments("}")
        yield from _literals(text, self.end.removeprefix(ended))

    def _value(self, text: TextInput) -> Wait[tuple[str, str]]:
        """A value, and what ended it."""
        begin, end = self.value
        parts: list[str] = []
        if begin:
            yield from text.run(SPACE)
            yield from text.literal(begin)
            ended = yield from text.until((end,), parts.append)
            return "".join(parts), ended
        line = "\n" if (yield from text.peek()) == "\n" else ""
        ends = (end, self.key[0], self.end.split()[0])
        ended = yield from text.until(tuple(line + each for each in ends), parts.append)
        return "".join(parts).removeprefix(line).removesuffix(end), ended.removeprefix(line)


def pythonic(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
    """A list of Python calls is all of the answer, and names known tools."""
    output.content((yield from text.run(SPACE)))
    begun = (yield from text.literal("<|python_start|>")) + (yield from text.literal("["))
    is_list = begun.endswith("[")
    while is_list:
        text.attempt(begun)
        yield from text.run(SPACE)
        name = yield from text.run(NAME)
        parts: list[str] = []
        if name not in schemas or (yield from text.peek()) != "(" or not (yield from _parentheses(text, parts.append)):
            break
        try:
            arguments = _keywords("".join(parts))
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # of Python's parser
            break
        _whole(text, output, name, arguments)
        yield from text.run(SPACE)
        begun = yield from text.literal(",", "]")
        if begun != ",":
            yield from text.literal("<|python_end|>")
            return
    output.content(text.fail() if is_list else begun)


def gemma(start: str, end: str, quote: str) -> ToolParser:
    """`call:f{k:v}` between two markers, texts between two quotes."""

    def read(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
        while begun := (yield from text.until((start,), output.content)):
            text.attempt(begun)
            yield from text.run(SPACE)
            if (yield from text.literal("call:")):
                name = yield from text.run(NAME)
                if name and (yield from text.peek()) == "{":
                    text.commit()
                    output.begin(name)
                    yield from _gemma_value(text, output, quote)
                    yield from text.literal(end)
            output.content(text.fail())

    return read


def _gemma_value(text: TextInput, output: AnswerOutput, quote: str, depth: int = 0) -> Wait[bool]:
    """False: this is no value, or it is not complete."""
    if (yield from text.literal(quote)):
        parts: list[str] = []
        is_complete = yield from text.until((quote,), parts.append)
        output.arguments(json_text("".join(parts)))
        return bool(is_complete)
    bracket = yield from text.literal("{", "[")
    if not bracket:
        scalar = yield from text.run(SCALAR)
        output.arguments(scalar if is_json(scalar) else json_text(scalar))
        return bool(scalar)
    output.arguments(bracket)
    close = "}" if bracket == "{" else "]"
    if depth == MAX_DEPTH:
        return False
    before = ""
    yield from text.run(SPACE)
    while not (yield from text.literal(close)):
        output.arguments(before)
        if bracket == "{":
            key = yield from text.run(KEY)
            key = key.replace(quote, "").strip()
            if not key or not (yield from text.literal(":")):
                return False
            output.arguments(f"{json_text(key)}: ")
            yield from text.run(SPACE)
        if not (yield from _gemma_value(text, output, quote, depth + 1)):
            return False
        yield from text.run(SPACE)
        yield from text.literal(",")
        yield from text.run(SPACE)
        before = ", "
    output.arguments(close)
    return True


def _whole(text: TextInput, output: AnswerOutput, name: str, arguments: str) -> None:
    text.commit()
    output.begin(name)
    output.arguments(arguments)


def _literals(text: TextInput, wanted: str) -> Wait[bool]:
    """Its words, with any white space between and around them. False: another word comes."""
    for word in wanted.split():
        yield from text.run(SPACE)
        if not (yield from text.literal(word)):
            return False
    return True


def _parentheses(text: TextInput, sink: Callable[[str], None]) -> Wait[bool]:
    """Give what stands between parentheses to `sink`. False: the text has ended in it."""
    depth, quote = 0, ""
    while (yield from text.more()):
        piece = yield from text.run(CODE if not quote else QUOTED[quote])
        sink(piece)
        letter = yield from text.peek()
        if letter == "\\" and quote:
            sink((yield from text.any()))
            sink((yield from text.any()))
            continue
        sink((yield from text.any()))
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTED:
            quote = letter
        elif letter:
            depth += 1 if letter in "([{" else -1
            if not depth:
                return True
    return False


def _keywords(code: str) -> str:
    """The arguments of a call, `(k=1)`, as JSON. Raises `ValueError` or what Python's parser does for other code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        call = ast.parse(f"f{code}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("a call has keyword arguments only")
    return json_text({str(each.arg): _literal(each.value) for each in call.keywords})


def _literal(node: ast.expr) -> Any:
    """Python's literals, and JSON's."""
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(each) for each in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="true" | "false" | "null" as name):
            return json.loads(name)
    raise ValueError("no literal")


def _typed(given: str, key: str, schema: Mapping[str, Any]) -> str:
    """A value without quotes, as JSON: a text if the schema wants one, or if it is none of JSON's other values.

    Python's True, False and None count as JSON's where the schema has another type.
    """
    properties = schema.get("properties")
    wanted = properties.get(key) if isinstance(properties, dict) else None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    text = given.strip()
    if kind and "string" not in kind:
        text = PYTHON_WORDS.get(text, text)
    return text if kind != "string" and is_json(text) else json_text(given)
