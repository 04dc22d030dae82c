"""A wrong grammar is refused by name before anything runs; a hostile one costs only its sender."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.frontend import preprocessing
from cluster.frontend.servers import load_tokenizer
from diptych.errors import DiptychError
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, opened
from tests.model.tiny import write_tiny_llama
from workers.request import Grammar

SCHEMA = "response_format.json_schema.schema"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
async def real(dispatcher: FakeDispatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clients]:
    """A gateway with a real tokenizer and its processes, which here do not yield to what else this machine runs."""
    monkeypatch.setattr(preprocessing, "GRAMMAR_NICENESS", 0)
    monkeypatch.setattr(preprocessing, "GRAMMAR_S", 25.0)
    folder = write_tiny_llama(tmp_path / "tiny")
    async with opened(dispatcher, partial(load_tokenizer, str(folder), 512)) as (clients, _):
        yield clients


async def refusal(there: Clients, **fields: Any) -> tuple[str, str]:
    """The field and the message; both paths refuse alike, streaming or not."""
    found = []
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)):
        for stream in (False, True):
            answer = await there.http.post(path, json=body | fields | {"stream": stream})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["code"] == "invalid_argument" or error["code"] == "invalid_request", error
            found.append((error["param"], error["message"]))
    assert len(set(found)) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"regex": "(a"}, 'sampling.regex: cannot be compiled: "(a": unclosed group'),
        ({"json_schema": {"type": "nonsense"}}, "sampling.json_schema: cannot be compiled: Invalid type: nonsense"),
    ],
)
async def test_over_grpc_a_refused_grammar_is_named_by_its_field(
    real: Clients, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(DiptychError) as refused:
        await real.grpc.complete("hi", max_tokens=3, **option)
    assert refused.value.field == f"sampling.{next(iter(option))}" and refused.value.message == message


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": {"a": 1}}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"json_schema": {"schema": {}}}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": schema([])}, SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}, f"{SCHEMA[:27]}.x"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": {}}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"regex": "a" * (65 << 10)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_choice": ["a", 3]}, "guided_choice"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"regex": "a"}, "regex"),
    ],
)
async def test_a_wrong_field_is_named(
    there: Clients, dispatcher: FakeDispatcher, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal(there, **fields))[0] == param
    assert not dispatcher.requests


async def test_a_deep_schema_is_refused(there: Clients) -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"items": deep}
    assert await refusal(there, response_format=schema(deep)) == (
        SCHEMA,
        f"{SCHEMA}: is nested more than 64 levels deep; flatten it",
    )


async def test_grammars_that_cannot_be_compiled_are_refused(real: Clients, dispatcher: FakeDispatcher) -> None:
    for fields, param, why in (
        ({"response_format": schema({"type": "array", "uniqueItems": True})}, SCHEMA, "uniqueItems"),
        ({"response_format": schema({"$ref": "#"})}, SCHEMA, "no text can match it"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "cannot be read"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "::= ::="}}, "structured_outputs.grammar", "neither Lark nor GBNF"),
    ):
        found, message = await refusal(real, **fields)
        assert found == param and why in message, message
    assert not dispatcher.requests


async def test_a_hostile_grammar_ends_only_its_process(real: Clients, dispatcher: FakeDispatcher) -> None:
    """One overflows the compiler's stack, one never ends; the next request is served."""
    rules = "start: r0\n" + "\n".join(f"r{number}: r{number + 1}" for number in range(4000)) + '\nr4000: "a"'
    cross = "start: T\nT: " + " & ".join(f"/.*a.{{{number}}}b.*/" for number in range(3, 60))
    for text, why in ((rules, "too deep or too large"), (cross, "takes more than 0.2 s to compile")):
        answer = await real.http.post("/v1/chat/completions", json=CHAT | {"structured_outputs": {"grammar": text}})
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    good = await real.http.post(
        "/v1/chat/completions", json=CHAT | {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}
    )
    assert good.status_code == 200, good.text
    (request,) = dispatcher.requests
    assert request.sampling.grammar is not None and request.sampling.grammar.kind == "lark"


async def test_hostile_grammars_delay_no_other_new_grammar(real: Clients) -> None:
    """Each ends after 0.2 s of computation; a new grammar of another client waits for those before it."""
    warm = await real.http.post("/v1/chat/completions", json=CHAT | {"structured_outputs": {"regex": "a"}})
    assert warm.status_code == 200

    async def hostile(number: int) -> Any:
        cross = "start: T\nT: " + " & ".join(f"/.*{'abcd'[number]}.{{{each}}}b.*/" for each in range(3, 60))
        return await real.http.post("/v1/chat/completions", json=CHAT | {"structured_outputs": {"grammar": cross}})

    sent = [asyncio.ensure_future(hostile(number)) for number in range(4)]
    await asyncio.sleep(0)
    good = await real.http.post("/v1/chat/completions", json=CHAT | {"structured_outputs": {"regex": "ab?"}})
    assert good.status_code == 200 and not all(each.done() for each in sent)
    for each in await asyncio.gather(*sent):
        assert each.status_code == 400 and "takes more than 0.2 s" in each.json()["error"]["message"]


async def test_a_large_body_keeps_its_grammar(real: Clients, dispatcher: FakeDispatcher) -> None:
    wide = {"type": "object", "properties": {f"p{number}": {"type": "boolean"} for number in range(200)}}
    body = CHAT | {"response_format": schema(wide)}
    assert len(json.dumps(body)) > 4096
    for _ in range(2):  # the second time it is known
        answer = await real.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    assert all(json.loads(each.sampling.grammar.text) == wide for each in dispatcher.requests if each.sampling.grammar)
    refused = await real.http.post("/v1/chat/completions", json=CHAT | {"response_format": schema({"not": wide})})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, SCHEMA)


async def test_without_the_extra_a_request_is_refused(
    dispatcher: FakeDispatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.errors import InvalidRequest
    from workers.model import tokenizer

    monkeypatch.setattr(tokenizer, "has_grammars", lambda: False)
    made = tokenizer.ModelTokenizer(write_tiny_llama(tmp_path / "tiny"))
    made.load_grammars()
    with pytest.raises(InvalidRequest, match=r"sampling\.grammar: .*pip install 'diptych\[structured\]'"):
        made.check_grammar(Grammar("regex", "a"))
