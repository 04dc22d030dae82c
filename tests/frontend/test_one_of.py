"""`with_any_of` never changes which values match; what it proves includes nullable types and pydantic's unions."""

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from cluster.frontend.one_of import MAX_COMPARED, with_any_of, with_any_of_in
from workers.errors import InvalidRequest
from workers.request import Grammar

SCALARS: list[Any] = [None, True, False, 0, 1, 1.0, 1.5, "a", "b"]
OBJECTS: list[Any] = [{"t": each} for each in (*SCALARS, {"t": "a"})]
VALUES: list[Any] = [*SCALARS, *OBJECTS, {}, {"u": 1}, *({"t": each, "u": "a"} for each in SCALARS), [], [None], ["a"]]
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
LEAVES = st.one_of(
    st.builds(lambda kind: {"type": kind}, TYPES),
    st.builds(lambda kinds: {"type": kinds}, st.lists(TYPES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, st.sampled_from([*SCALARS, [], {"t": "a"}])),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3)),
    st.builds(
        lambda kinds, values: {"type": kinds, "enum": values},
        st.lists(TYPES, min_size=1, max_size=2, unique=True),
        st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3),
    ),
    st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from("AB")),
    st.just({"type": ["string", "null"], "maxLength": 1, "description": "short"}),
    st.booleans(),
    st.just({}),
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["t", "u"]), unique=True)
    kinds: st.SearchStrategy[dict[str, Any]] = st.sampled_from([{}, {"type": "object"}, {"type": ["object", "null"]}])
    named = st.dictionaries(st.sampled_from(["t", "u"]), parts, min_size=1)
    built = st.builds(lambda kind, properties, required: {**kind, "properties": properties, "required": required},
                      kinds, named, names)  # fmt: skip
    return st.one_of(built, st.builds(lambda found: {"oneOf": found}, st.lists(parts, min_size=1, max_size=3)))


SCHEMAS = st.recursive(LEAVES, objects, max_leaves=6)


@given(st.lists(SCHEMAS, min_size=2, max_size=4), SCHEMAS, SCHEMAS)
def test_the_same_values_match(parts: list[Any], first: Any, second: Any) -> None:
    """Cycles of references are left out: `jsonschema` cannot end on them."""
    schema = {"oneOf": parts, "$defs": {"A": without_refs(first), "B": without_refs(second)}}
    given, changed = Draft202012Validator(schema), Draft202012Validator(with_any_of(schema))
    for value in VALUES:
        assert given.is_valid(value) == changed.is_valid(value), (schema, changed.schema, value)


def without_refs(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_refs(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_refs(value) for key, value in schema.items() if key != "$ref"}


class Cat(BaseModel):
    kind: Literal["cat"]
    friend: "Pet | None"


class Dog(BaseModel):
    kind: Literal["dog", "hound"]


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def constant(value: str) -> dict[str, Any]:
    return {"properties": {"t": {"const": value}}}


STRING, NUMBER = {"type": ["string", "null"]}, {"type": ["number", "null"]}
PROVED: dict[str, Any] = {
    "nullable types": {"oneOf": [STRING, NUMBER]},
    "a type and null": {"properties": {"default": {"oneOf": [{"type": "null"}, STRING]}}},
    "constants": {"oneOf": [{"const": 1}, {"const": 2}, {"const": "1"}]},
    "an enum of another type": {"oneOf": [{"enum": ["a", "b"]}, {"type": "boolean"}]},
    "the fields of a union": Pet.model_json_schema(),
    "references": {"$defs": {"A/B": {"type": "string"}}, "oneOf": [{"$ref": "#/$defs/A~1B"}, {"type": "array"}]},
}
OVERLAPPING: dict[str, Any] = {
    "integers and numbers": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "1 and 1.0": {"oneOf": [{"const": 1}, {"const": 1.0}]},
    "a field that may be missing": {"oneOf": [{"type": "object", **constant(each)} for each in "ab"]},
    "two fields": {"oneOf": [{"type": "object", "required": [each]} for each in "ab"]},
    "null in an enum": {"oneOf": [STRING, {"enum": [1, None]}]},
    "what stands beside a reference": {
        "$defs": {"A": {}}, "oneOf": [{"$ref": "#/$defs/A", "type": "string"}, {"type": "null"}]
    },
    "a reference into another document": {
        "$defs": {"A": {"type": "string"}},
        "oneOf": [{"$id": "http://b", "$defs": {"A": {}}, "properties": {"t": {"$ref": "#/$defs/A"}}}, NUMBER],
    },
    "fields of what may be no object": {"oneOf": [{**constant(each), "required": ["t"]} for each in "ab"]},
    "a reference to itself": {"oneOf": [{"$ref": "#"}, {"type": "null"}]},
    "more than are compared": {"oneOf": [{"const": each} for each in range(MAX_COMPARED)]},
}  # fmt: skip


@pytest.mark.parametrize("name", PROVED)
def test_alternatives_that_exclude_each_other(name: str) -> None:
    assert "oneOf" not in str(with_any_of(PROVED[name]))


@pytest.mark.parametrize("name", OVERLAPPING)
def test_alternatives_that_may_overlap(name: str) -> None:
    assert with_any_of(OVERLAPPING[name]) == OVERLAPPING[name]


NAMED = {"type": "object", "patternProperties": {"^[ab]$": {}}}


def test_names_that_may_come_twice_are_not_counted() -> None:
    for schema in ({"minProperties": 2}, {**NAMED, "additionalProperties": False, "minProperties": 2}):
        with pytest.raises(InvalidRequest, match="minProperties above 1"):
            with_any_of_in(Grammar("json", json.dumps({"type": "array", "items": schema})))
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 2}
    for schema in (closed, {**NAMED, "minProperties": 1}, {"required": ["a", "b"], "minProperties": 2}):
        assert with_any_of(schema) == schema


def test_only_schemas_change() -> None:
    literal = {"oneOf": [STRING, NUMBER]}
    schema = {"enum": [literal], "default": literal, "required": ["oneOf"], "properties": {"oneOf": True}}
    schema |= {"dependentRequired": {"oneOf": ["a"]}}
    assert with_any_of(schema) == schema


CYCLES: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "a property's": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"p": {"$ref": "#/$defs/a"}}},
    "two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}},
    "in allOf": {"$defs": {"a": {"allOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]}}},
    "many": {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}},
}
TREES: dict[str, dict[str, Any]] = {
    "a tree": {"$defs": {"n": {"properties": {"c": {"items": {"$ref": "#/$defs/n"}}}}}, "$ref": "#/$defs/n"},
    "a list": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "an option": {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "shared": {"$defs": {"a": {"type": "null"}}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
    "unknown": {"$ref": "#/$defs/none"},
}


@pytest.mark.parametrize("name", CYCLES)
def test_a_reference_that_leads_to_itself_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="leads to itself"):
        with_any_of_in(Grammar("json", json.dumps(CYCLES[name])))


@pytest.mark.parametrize("name", TREES)
def test_recursive_types_are_not(name: str) -> None:
    assert with_any_of(TREES[name]) == TREES[name]
