"""The grammar of a request from OpenAI's `response_format` or vLLM's fields. Pure.

response_format       {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": ...}}
structured_outputs    {"json": ...}, or regex, choice, grammar or json_object, as in vLLM
guided_json ...       as in vLLM before 0.12, with guided_regex, guided_choice and guided_grammar
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cluster.frontend.http.fields import refuse_others
from cluster.frontend.text import check_depth
from workers.errors import InvalidRequest
from workers.request import Grammar

ANY_OBJECT = Grammar("json", '{"type": "object"}')
KINDS = ("json", "regex", "choice", "grammar")
FORMAT_FIELDS = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
SCHEMA_FIELDS = {"name", "description", "schema", "strict"}


def grammar_from(body: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    """The path of the field and its grammar; None: any text. Raises `InvalidRequest` for several grammars."""
    readers: dict[str, Callable[[Any], tuple[str, Grammar] | None]]
    readers = {"response_format": _of_format, "structured_outputs": _of_structured}
    readers |= {f"guided_{kind}": partial(_of_guided, kind) for kind in KINDS}
    given = ((read, body.get(name)) for name, read in readers.items())
    found = [each for read, value in given if value is not None and (each := read(value)) is not None]
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"is given together with {found[0][0]}; an answer has one grammar")
    return found[0] if found else None


def _of_format(given: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    kind = given.get("type", None if given else "text")
    if not isinstance(kind, str) or kind not in FORMAT_FIELDS:
        rule = "text, json_object and json_schema are"
        raise InvalidRequest("response_format.type", f"{str(kind)[:40]!r} is not supported; {rule}")
    refuse_others("response_format", given, FORMAT_FIELDS[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format", ANY_OBJECT
    where, wrapped = "response_format.json_schema", given.get("json_schema")
    if not isinstance(wrapped, dict) or wrapped.get("schema") is None:
        raise InvalidRequest(where, 'needs a schema: {"name": ..., "schema": {...}}')
    refuse_others(where, wrapped, SCHEMA_FIELDS)
    return f"{where}.schema", _of_kind(f"{where}.schema", "json", wrapped["schema"])


def _of_structured(given: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    refuse_others("structured_outputs", asked, {*KINDS, "json_object"})
    if len(asked) > 1:
        names = " and ".join(asked)
        raise InvalidRequest("structured_outputs", f"has {names}; an answer has one grammar")
    for kind, value in asked.items():
        where = f"structured_outputs.{kind}"
        if kind != "json_object":
            return where, _of_kind(where, kind, value)
        if value is not True:
            raise InvalidRequest(where, "must be true or false")
        return where, ANY_OBJECT
    return None


def _of_guided(kind: str, value: Any) -> tuple[str, Grammar] | None:
    where = f"guided_{kind}"
    return None if value in (False, "", []) else (where, _of_kind(where, kind, value))  # requests nothing, as elsewhere


def _of_kind(where: str, kind: str, value: Any) -> Grammar:
    """Raises `InvalidRequest` for a value of the wrong type. `workers.model.grammar` checks what it says."""
    match kind, value:
        case "json", dict() | str():
            check_depth(where, value)
            return Grammar("json", value if isinstance(value, str) else json.dumps(value))
        case "choice", [_, *_] if all(isinstance(each, str) for each in value):
            return Grammar("choice", json.dumps(value))
        case "regex", str():
            return Grammar("regex", value)
        case "grammar", str():
            return Grammar("grammar", value)
    wanted = {"json": "a JSON schema", "choice": "a list of at least one string"}.get(kind, "text")
    raise InvalidRequest(where, f"must be {wanted}")
