"""JSON in answers: calls with a name and arguments, and values. Pure."""

import json
import re
from collections.abc import Container
from typing import Any

from cluster.frontend.tools.answer import AnswerOutput
from cluster.frontend.tools.text_input import SPACE, TextInput, Wait

ARGUMENTS = ("arguments", "parameters")
SURROGATE = re.compile("[\ud800-\udfff]")


def named_json(text: TextInput, output: AnswerOutput, name: str) -> Wait[None]:
    """The arguments of this tool, if they come next."""
    yield from text.run(SPACE)
    if (yield from text.peek()) == "{":
        text.commit()
        output.begin(name)
        yield from text.json_value(output.arguments)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if SURROGATE.search(text) else text


def json_list(text: TextInput, output: AnswerOutput) -> Wait[None]:
    """Calls after an opening bracket. One that is none is left as an attempt."""
    while (yield from json_call(text, output)):
        yield from text.run(SPACE)
        if not (yield from text.literal(",")):
            yield from text.literal("]")
            break
        text.attempt(",")


def json_call(text: TextInput, output: AnswerOutput, known: Container[str] | None = None) -> Wait[bool]:
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
            kept = held.append if key in ARGUMENTS and not is_begun else drop
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


def drop(text: str) -> None:
    """Syntax that no client needs."""
