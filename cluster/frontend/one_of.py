"""JSON schemas whose `oneOf` cannot match twice, with `anyOf` in its place, which a grammar can express. Pure.

llguidance proves that for some alternatives itself. Here references are followed, and null is no obstacle: where two
alternatives allow it, `oneOf` refuses it, so it is taken from all. What is not proved stays as it is.
Counts of names that a grammar cannot tell apart are refused, and references that lead to themselves.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from workers.errors import InvalidRequest
from workers.request import Grammar

MAX_COMPARED = 2000  # alternatives, properties and values of a schema
MAX_DEPTH = 8  # of properties, and of references
MAX_IN_A_ROW = 64  # references that lead to each other
LITERALS = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # have schemas by name
OF_TYPE = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
ALL_TYPES = frozenset((*OF_TYPE.values(), "null"))
# Keywords that say nothing about null.
NOT_OF_NULL = {
    *("type", "title", "description", "default", "examples", "format", "minLength", "maxLength", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "minItems", "maxItems"),
    *("properties", "required", "additionalProperties"),
}


def with_any_of_in(grammar: Grammar) -> Grammar:
    """The same with such a schema. A text that is no schema stays as it is, for the error of compiling it."""
    if grammar.kind != "json" or not any(f'"{name}"' in grammar.text for name in ("oneOf", "minProperties", "$ref")):
        return grammar
    with suppress(ValueError, TypeError, RecursionError):
        given = json.loads(grammar.text)
        if (schema := with_any_of(given)) == given:
            return grammar
        return Grammar("json", json.dumps(schema, separators=(",", ":"), ensure_ascii=False))
    return grammar


def with_any_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An equivalent schema."""
    changed: dict[str, Any] = _Prover(schema).changed(schema)
    return changed


class _Prover:
    """`root`: the schema that references begin at."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_COMPARED
        self._ending: set[str] = set()  # references that do not lead to themselves

    def changed(self, node: Any, *, is_named: bool = False) -> Any:
        """`is_named`: the node's keys are names of schemas, and no keywords."""
        if isinstance(node, list):
            return [self.changed(each) for each in node]
        if not isinstance(node, dict):
            return node
        if is_named:
            return {name: self.changed(schema) for name, schema in node.items()}
        self._refuse_cycle(node, ())
        kept = {key: value for key, value in node.items() if key in LITERALS}
        found = {key: self.changed(value, is_named=key in NAMED) for key, value in node.items()} | kept
        if _counts_names_twice(found):
            why = "minProperties above 1 cannot be enforced where any names are allowed, which may come twice"
            raise InvalidRequest("sampling.grammar", f"cannot be compiled: {why}; leave it out, or require names")
        parts = found.get("oneOf")
        if isinstance(parts, list) and all(isinstance(each, dict | bool) for each in parts) and "anyOf" not in found:
            found["oneOf"] = parts = self._without_null(parts)
            if all(self._exclude(one, other) for at, one in enumerate(parts) for other in parts[:at]):
                found["anyOf"] = found.pop("oneOf")
        return found

    def _without_null(self, parts: Sequence[Any]) -> list[Any]:
        """Null taken from all, if two of them allow it and it is known which do."""
        nullable = [each for each in parts if "null" in _types(self._resolved(each))]
        if len(nullable) < 2 or not all(_says_null(each) for each in nullable):
            return list(parts)
        others = ({**each, "type": [kind for kind in _listed(each["type"]) if kind != "null"]} for each in nullable)
        kept = [next(others) if each in nullable else each for each in parts]
        return [each for each in kept if each is False or each.get("type") != []]

    def _exclude(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether it is proved that no value matches both."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            return False
        one, other = self._resolved(one), self._resolved(other)
        shared, values, others = _types(one) & _types(other), self._values(one), self._values(other)
        if not shared or (values is not None and others is not None and values.isdisjoint(others)):
            return True
        if shared != {"object"}:
            return False
        mine, theirs = _properties(one), _properties(other)
        needed = {*_names(one.get("required")), *_names(other.get("required"))}
        both = [name for name in mine if name in theirs and name in needed]
        return any(self._exclude(mine[name], theirs[name], depth + 1) for name in both)

    def _values(self, schema: Mapping[str, Any]) -> set[Any] | None:
        """The only values that match, if they are scalars. 1, 1.0 and true count as the same."""
        values = _literals(schema)
        if values is None or any(isinstance(each, list | dict) for each in values):
            return None
        self._left -= len(values)
        return set(values)

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a reference leads to, without what stands beside it. Empty, which allows all, where it is not known."""
        for _ in range(MAX_DEPTH):
            if schema is False:
                return {"type": []}
            if not self._is_inside(schema):
                return {}
            if not isinstance(reference := schema.get("$ref"), str):
                return schema  # type: ignore[no-any-return]
            schema = self._target(reference)
        return {}

    def _target(self, reference: str) -> Any:
        first, *path = reference.split("/")
        schema: Any = self._root if first == "#" else {}
        for part in path:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if self._is_inside(schema) else None
        return schema

    def _refuse_cycle(self, schema: Any, path: tuple[str, ...]) -> None:
        """A value that must match what it is compared with already never can. `path`: the references to `schema`."""
        if not self._is_inside(schema):
            return
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._ending:
            if reference in path or len(path) == MAX_IN_A_ROW:
                why = f"the $ref to {reference[:80]!r} leads to itself, or is one of many in a row"
                raise InvalidRequest("sampling.grammar", f"no text can match it: {why}; give it a type")
            self._refuse_cycle(self._target(reference), (*path, reference))
            self._ending.add(reference)
        for part in _listed(schema.get("allOf", [])):
            self._refuse_cycle(part, path)

    def _is_inside(self, schema: Any) -> bool:
        """Whether it is an object in which references begin at the root."""
        if not isinstance(schema, dict):
            return False
        return schema is self._root or not any(isinstance(schema.get(name), str) for name in ("$id", "id"))


def _counts_names_twice(schema: Mapping[str, Any]) -> bool:
    """Whether a grammar, which cannot tell that a name has come before, would count it again."""
    least, is_open = schema.get("minProperties"), schema.get("additionalProperties") is not False
    enough = max(1, len(set(_names(schema.get("required")))))
    return isinstance(least, int) and least > enough and (is_open or "patternProperties" in schema)


def _says_null(schema: Any) -> bool:
    """Whether its type alone tells if it allows null."""
    return isinstance(schema, dict) and "type" in schema and schema.keys() <= NOT_OF_NULL


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Those that the schema may allow; integers are numbers."""
    types = ALL_TYPES
    if "type" in schema:
        types &= {"number" if each == "integer" else each for each in _names(_listed(schema["type"]))}
    values = _literals(schema)
    return types if values is None else types & {OF_TYPE.get(type(each), "null") for each in values}


def _literals(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _names(given: Any) -> list[str]:
    return [each for each in given if isinstance(each, str)] if isinstance(given, list) else []


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]
