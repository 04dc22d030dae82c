"""What the document at /openapi.json says of a body's fields is what the parsers do."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.frontend.http.bodies import (
    Body,
    CompletionBody,
    DetokenizeBody,
    Generation,
)
from cluster.frontend.http.chat_body import ChatBody, TokenizeBody
from cluster.frontend.http.embeddings import EmbeddingsBody
from cluster.frontend.http.fields import FIELDS, IGNORED
from cluster.frontend.http.messages_body import MessagesBody
from cluster.frontend.http.responses_body import ResponsesBody
from tests.frontend.http.opened import Clients
from workers.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "hi"}]
VALID: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "hi", "echo": True},
    ChatBody: {"messages": MESSAGES, "logprobs": True},
    ResponsesBody: {"input": "hi"},
    MessagesBody: {"messages": MESSAGES, "max_tokens": 1},
    EmbeddingsBody: {"input": "hi"},
    TokenizeBody: {"prompt": "hi"},
    DetokenizeBody: {"tokens": [1]},
}
KINDS = pytest.mark.parametrize("kind", VALID, ids=lambda kind: kind.__name__)


def refusal(kind: type[Body], **given: Any) -> str:
    """Of a valid body with this field; empty: it is accepted."""
    try:
        body = kind.model_validate(VALID[kind] | given)
        if isinstance(body, Generation):
            body.sampling()
        if isinstance(body, MessagesBody):
            body.chat.sampling()
        if isinstance(body, ResponsesBody):
            body.chat_after(()).sampling()
    except InvalidRequest as error:
        return f"{error.field}: {error.message}"
    except ValidationError as error:
        return f"{error.errors()[0]['loc'][0]}: {error}"
    return ""


def fields(kind: type[Body]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    assert schema["additionalProperties"] is False
    found: dict[str, Any] = schema["properties"]
    return found


@KINDS
def test_the_document_has_every_field_that_the_parser_knows(kind: type[Body]) -> None:
    assert fields(kind).keys() == {*kind.model_fields, *kind.known_fields(), *IGNORED, *FIELDS}


@KINDS
def test_a_field_that_is_not_in_the_document_is_refused_as_unknown(kind: type[Body]) -> None:
    assert "zzz: is unknown" in refusal(kind, zzz=1)


@KINDS
def test_of_unsupported_fields_only_the_documented_values_pass(kind: type[Body]) -> None:
    checked = 0
    for name, described in fields(kind).items():
        if "enum" not in described:
            continue
        checked += 1
        assert not [value for value in described["enum"] if refusal(kind, **{name: value})], name
        for value in ("zzz", 7, True, [1], {"a": 1}):
            passes = any(type(each) is type(value) and each == value for each in described["enum"])  # 1 is not true
            assert refusal(kind, **{name: value}).startswith(f"{name}:") != passes, (name, value)
    assert checked > 20


@KINDS
def test_fields_without_a_type_or_values_pass_with_any(kind: type[Body]) -> None:
    harmless = [name for name, each in fields(kind).items() if each.keys() == {"description"}]
    assert {"user", "service_tier"} & set(harmless)
    for name in harmless:
        assert not [value for value in (None, "zzz", 7, {"a": 1}) if refusal(kind, **{name: value})], name


def bounded(kind: type[Body]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, described in fields(kind).items():
        for each in described.get("anyOf", ()):
            if {"minimum", "exclusiveMinimum", "maximum"} & each.keys():
                yield name, each


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody, MessagesBody])
def test_numbers_have_the_documented_bounds(kind: type[Body]) -> None:
    found = list(bounded(kind))
    assert {"temperature", "top_p"} <= {name for name, _ in found}
    for name, each in found:
        step = 1 if each["type"] == "integer" else 0.001
        more = {"best_of": 64} if name == "n" else {}  # which has n as its least value
        least = each.get("minimum", each.get("exclusiveMinimum", 0.0) + step)
        valid, wrong = [least], [least - step]
        if "maximum" in each:
            valid, wrong = [*valid, each["maximum"]], [*wrong, each["maximum"] + step]
        assert not [refusal(kind, **more, **{name: value}) for value in valid if refusal(kind, **more, **{name: value})]
        assert all(refusal(kind, **{name: value}) for value in wrong), name


# A body of each API with an object at every place that has one.
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}, "strict": False}}
PART = {"type": "text", "text": "hi"}
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
FULL: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hi",
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": FORMAT,
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [PART]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "123456789", "content": "1"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "123456789", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "123456789", "output": "1"},
        ],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "none"},
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
    },
    "/v1/messages": {
        "max_tokens": 8,
        "system": [PART],
        "messages": [
            {"role": "user", "content": [PART]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "123456789", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "123456789", "content": [PART]}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
    },
    "/tokenize": {"messages": [{"role": "user", "content": [PART]}], "tools": [TOOL]},
    "/v1/embeddings": {"input": "hi"},
    "/detokenize": {"tokens": [70]},
}
FREE = ("parameters", "input_schema", "schema", "input")  # objects whose keys are the client's


def spoiled(body: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of a body, each with an unknown field in another object."""
    for place in places(body):
        made = copy.deepcopy(body)
        target = made
        for step in place:
            target = target[step]
        target["zzz"] = 1
        yield ".".join(map(str, place)), made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield path
    for step, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict | list) and not (isinstance(each, dict) and step in FREE):
            yield from places(each, (*path, step))


@pytest.mark.parametrize("path", FULL)
async def test_unknown_fields_are_refused_by_name_in_every_object(there: Clients, path: str) -> None:
    seen = 0
    for place, body in spoiled(FULL[path]):
        answer = await there.http.post(path, json=body)
        named = "zzz" in answer.text or (place.startswith("tool_choice") and "tool_choice" in answer.text)
        assert answer.status_code == 400 and named, (place, answer.text)
        seen += 1
    assert seen == len(list(places(FULL[path])))
