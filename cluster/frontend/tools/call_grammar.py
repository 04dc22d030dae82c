"""Grammars that enforce tool calls in the model's own format, so that its parser reads them. In llguidance's Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.frontend.tools.answer import Schemas
from cluster.frontend.tools.formats import AnswerFormat, Pairs
from workers.errors import InvalidRequest
from workers.request import MOST_GRAMMAR_BYTES, Grammar

# As for other structured output (`workers.model.grammar`).
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{0,20}", "lenient": False}
NO_RULES = {"type", "title", "description", "default", "examples", "minLength", "maxLength", "enum", "const"}
MOST_VALUES, MAX_DEPTH = 256, 16  # of a tool's values: references may go round
SCALARS = ("number", "integer", "boolean", "null")


def call_grammar(
    form: AnswerFormat, schemas: Schemas, special: Mapping[str, int], *, is_reasoning: bool, is_single: bool
) -> Grammar:
    """One call or more of these tools, after reasoning if the model reasons. `special`: ids of special tokens.

    `is_reasoning`: the prompt has begun the reasoning. `is_single`: one call. Raises `InvalidRequest` for a schema that
    this format cannot enforce.
    """
    calls, reasoning = form.calls, form.reasoning
    assert calls is not None, "callers have checked"
    rules = _Rules(special)
    for index, (name, schema) in enumerate(schemas.items()):
        arguments = _json(schema) if calls.arguments is None else _Written(rules, calls.arguments, name, schema).all()
        opened, closed = rules.terms(calls.open.replace("NAME", name)), rules.terms(calls.close)
        rules.add(f"call{index}", f"{opened} {rules.new(arguments)} {closed}")
    rules.add("call", " | ".join(f"call{index}" for index in range(len(schemas))))
    more = "" if is_single or calls.between is None else f"({rules.terms(calls.between)} call)*"
    start = f"{rules.terms(calls.begin)} call {more} {rules.terms(calls.end)}"
    if reasoning is not None:
        thought = f"{rules.text_until(reasoning.end)} {rules.terms(reasoning.after)}"
        start = f"{thought if is_reasoning else f'({rules.terms(reasoning.start)} {thought})?'} SPACE {start}"
        rules.add("SPACE", r"/[ \n]{0,4}/")
    rules.add("start", start)
    return Grammar("lark", "\n".join(rules.lines))


class _Rules:
    """The rules of a grammar. Special tokens have no text: terms name them by their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._special = special
        self._num_chars = 0
        self._pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def add(self, name: str, body: str) -> None:
        self._num_chars += len(body)
        if self._num_chars > MOST_GRAMMAR_BYTES:
            why = f"need a grammar of more than {MOST_GRAMMAR_BYTES >> 10} KiB to require a call"
            raise InvalidRequest("tools", f"{why}; send fewer or simpler ones, or set tool_choice to auto")
        self.lines.append(f"{name}: {body}")

    def new(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self.lines)}"
        self.add(name + attributes, body)
        return name

    def terms(self, text: str) -> str:
        plain = self._pattern.split(text)
        found = [f"<[{self._special[token]}]>" for token in self._pattern.findall(text)]
        pairs = zip(map(_quoted, plain), [*found, ""], strict=True)
        return " ".join(term for pair in pairs for term in pair if term)

    def text_until(self, end: str, length: str = "*") -> str:
        """Any text and then `end`, which comes only there. `length`: of the text, for a regular expression."""
        if self._pattern.search(end):
            return f"{self.new(f'/(?s:.){length}/')} {self.terms(end)}"
        return self.new(f"/(?s:.){length}/", f"[suffix={_quoted(end)}]")


class _Written:
    """The arguments of one tool as pairs: those of the schema, the required ones first."""

    def __init__(self, rules: _Rules, pairs: Pairs, name: str, schema: Mapping[str, Any]) -> None:
        self._rules = rules
        self._pairs = pairs
        self._name = name
        self._schema = schema
        self._num_values = 0
        self._depth = 0

    def all(self) -> str:
        return self._object(self._schema)

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise self._refused("properties that are no object")
        needed = [self._pair(key, properties[key]) for key in properties if key in required]
        optional = [self._pair(key, properties[key]) for key in properties if key not in required]
        between = self._rules.terms(self._pairs.between)
        first = f" {between} ".join(needed)
        if needed or not between:
            return f"{first} {' '.join(f'({between} {each})?' for each in optional)}" if first or optional else '""'
        chains = (self._chain(optional[index:], between) for index in range(len(optional)))
        return f"({' | '.join(chains)})?" if optional else '""'

    def _chain(self, optional: Sequence[str], between: str) -> str:
        return f"{optional[0]} {' '.join(f'({between} {each})?' for each in optional[1:])}"

    def _pair(self, key: str, schema: Any) -> str:
        before, after = self._pairs.pair.split("VALUE")
        return self._rules.new(f"{self._rules.terms(before.replace('KEY', key))} {self._value(schema, after)}")

    def _value(self, given: Any, after: str) -> str:
        self._num_values += 1
        self._depth += 1
        if self._num_values > MOST_VALUES or self._depth > MAX_DEPTH:
            raise self._refused(f"more than {MOST_VALUES} values, or are nested more than {MAX_DEPTH} levels deep")
        found = self._any(given, after)
        self._depth -= 1
        return found

    def _any(self, given: Any, after: str) -> str:
        schema, quote = self._resolved(given), self._pairs.quote
        kind, closed = schema.get("type"), self._rules.terms(after)
        if isinstance(schema.get("enum"), list) and all(isinstance(each, str) for each in schema["enum"]):
            kind = "string"
        if kind == "string" and quote is not None:
            return self._text(schema, quote, after)
        if not self._pairs.is_nested or kind in SCALARS:
            return f"{self._rules.new(_json(schema, self._schema))} {closed}"
        if kind == "object" and schema.get("properties"):
            return f'"{{" {self._object(schema)} "}}" {closed}'
        if kind == "array" and schema.get("items"):
            item = self._rules.new(self._value(schema["items"], ""))
            return f'"[" ({item} ("," {item})*)? "]" {closed}'
        raise self._refused(f"a value of type {str(kind)[:40]}")

    def _text(self, schema: Mapping[str, Any], quote: str, after: str) -> str:
        if rest := schema.keys() - NO_RULES:
            raise self._refused(f"{min(rest)[:40]} of a text")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        opened, closed = self._rules.terms(quote), self._rules.terms(quote + after)
        if isinstance(values, list) and values:
            return f"{opened} ({' | '.join(_quoted(str(each)) for each in values)}) {closed}"
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if not isinstance(least, int) or not (most == "" or isinstance(most, int)) or values is not None:
            raise self._refused("a text without a proper length or choice")
        length = "*" if not least and most == "" else f"{{{least},{most}}}"
        if quote:
            return f"{opened} {self._rules.text_until(quote, length)} {self._rules.terms(after)}"
        return self._rules.text_until(after, length)

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Follows references to `$defs`; what is no object allows anything."""
        for _ in range(8):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = (self._schema.get("$defs") or {}).get(schema["$ref"].removeprefix("#/$defs/"))
        return schema if isinstance(schema, Mapping) else {}

    def _refused(self, what: str) -> InvalidRequest:
        why = f"of {self._name!r} have {what}, which cannot be enforced in this model's format of calls"
        return InvalidRequest("tools", f"{why}; simplify it, or set tool_choice to auto")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _json(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> str:
    """JSON of a schema. `root`: the one that it is part of; None: it is one of arguments, which are an object."""
    around = {"type": "object"} if root is None else {key: root[key] for key in ("$defs", "definitions") if key in root}
    alone = json.dumps({**schema, "x-guidance": JSON_OPTIONS})
    if root is not None and "$ref" not in alone:
        return f"%json {alone}"
    return f"%json {json.dumps({**around, **schema, 'x-guidance': JSON_OPTIONS})}"
