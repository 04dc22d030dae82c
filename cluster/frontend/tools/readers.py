"""Readers of tool calls, one for each kind of syntax: from a text to content and calls.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>     `tagged_json`
    llama    {"name": "f", "parameters": {...}}; {...}                    `bare_json`

What only looked like a call is content, from its marker on. Once a call's name is known and its arguments begin, it is
a call: a client sees the arguments as they come, even if they turn out to be no JSON. Pure.
"""

import json
from collections.abc import Callable, Container

from cluster.frontend.tools.answer import AnswerOutput, Schemas
from cluster.frontend.tools.text_input import SPACE, TextInput, Wait

Reader = Callable[[TextInput, AnswerOutput, Schemas], Wait[None]]
ARGUMENTS = ("arguments", "parameters")


def tagged_json(start: str, end: str) -> Reader:
    """A JSON object with name and arguments between two markers."""

    def read(text: TextInput, output: AnswerOutput, schemas: Schemas) -> Wait[None]:
        while begun := (yield from text.until((start,), output.content)):
            text.attempt(begun)
            if (yield from _json_call(text, output)):
                yield from text.run(SPACE)
                yield from text.literal(end)
            else:
                output.content(text.fail())

    return read


def _json_call(text: TextInput, output: AnswerOutput, known: Container[str] | None = None) -> Wait[bool]:
    """`{"name": ..., "arguments": {...}}`, in any order, with other keys or without. False: this is no call.

    `known`: a call has one of these names, and arguments.
    """
    yield from text.run(SPACE)
    if not (yield from text.literal("{")):
        return False
    name, held, is_begun = "", [""], False
    while True:
        yield from text.run(SPACE)
        key = yield from _json_string(text)
        yield from text.run(SPACE)
        if key is None or not (yield from text.literal(":")):
            return is_begun
        yield from text.run(SPACE)
        if key == "name" and not name:
            name = (yield from _json_string(text)) or ""
            if not name or (known is not None and name not in known):
                return False
            is_complete = True
        elif key in ARGUMENTS and name and not is_begun:
            is_begun = True
            text.commit()
            output.begin(name)
            is_complete = yield from _arguments(text, output)
        else:
            kept = held.append if key in ARGUMENTS and not is_begun else _drop
            is_complete = yield from text.json_value(kept)
        if not is_complete:
            return is_begun
        yield from text.run(SPACE)
        if (after := (yield from text.literal(",", "}"))) != ",":
            break
    if is_begun:
        return True
    arguments = "".join(held)
    if not name or not after or (known is not None and not arguments):
        return False
    text.commit()
    output.begin(name)
    output.arguments(arguments or "{}")
    return True


def _arguments(text: TextInput, output: AnswerOutput) -> Wait[bool]:
    """A JSON value, or a string that holds one."""
    if (yield from text.peek()) != '"':
        return (yield from text.json_value(output.arguments))
    value = yield from _json_string(text)
    output.arguments(value or "")
    return value is not None


def _json_string(text: TextInput) -> Wait[str | None]:
    """None: there is none, or it is not complete."""
    parts: list[str] = []
    if (yield from text.peek()) != '"' or not (yield from text.json_value(parts.append)):
        return None
    try:
        value: str = json.loads("".join(parts), strict=False)
        value.encode()
    except ValueError:  # a wrong escape, or half a surrogate pair
        return None
    return value


def _drop(text: str) -> None:
    """Syntax that no client needs."""
