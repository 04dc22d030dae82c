"""A grammar of required calls takes what its format's parser reads as calls of the schemas, and nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.frontend.tools.answer import AnswerDelta
from cluster.frontend.tools.answer_plan import answer_grammar
from cluster.frontend.tools.formats import CALLS, REASONING, AnswerFormat, AnswerParser
from tests.model.tiny import write_tiny_tokenizer
from workers.errors import InvalidRequest

SCHEMAS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "at": {"type": "string", "maxLength": 12},
            "times": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["at"],
        "additionalProperties": False,
    },
    "wait": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("grammar")
    write_tiny_tokenizer(folder)
    return LLTokenizer((folder / "tokenizer.json").read_text())


def takes(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def written(name: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """As the model writes these calls; arguments are texts and numbers."""
    form = CALLS[name]

    def arguments(given: dict[str, Any]) -> str:
        if form.arguments is None:
            return json.dumps(given)
        quote = form.arguments.quote
        texts = {
            key: json.dumps(value) if quote is None or not isinstance(value, str) else f"{quote}{value}{quote}"
            for key, value in given.items()
        }
        pairs = (form.arguments.pair.replace("KEY", key).replace("VALUE", text) for key, text in texts.items())
        return form.arguments.between.join(pairs)

    each = (form.open.replace("NAME", called) + arguments(given) + form.close for called, given in calls)
    return form.begin + (form.between or "").join(each) + form.end


def parsed(form: AnswerFormat, text: str, **options: Any) -> AnswerDelta:
    parser = AnswerParser(form, SCHEMAS, **options)
    return parser.push(text).joined(parser.flush())


GOOD: list[tuple[str, dict[str, Any]]] = [("look", {"at": "the sea", "times": 3, "unit": "C"})]
TWO: list[tuple[str, dict[str, Any]]] = [("look", {"at": "x", "unit": "F"}), ("wait", {})]
WRONG: list[list[tuple[str, dict[str, Any]]]] = [
    [("look", {"times": 3})],
    [("look", {"at": "the whole wide sea"})],
    [("look", {"at": "x", "unit": "K"})],
    [("look", {"at": "x", "more": 1})],
    [("go", {})],
    [],
]


@pytest.mark.parametrize("name", CALLS)
def test_the_parser_reads_what_the_grammar_takes(tokenizer: LLTokenizer, name: str) -> None:
    form = AnswerFormat(CALLS[name], None)
    several = answer_grammar(form, SCHEMAS, {}, is_reasoning=False, is_single=False).text
    single = answer_grammar(form, SCHEMAS, {}, is_reasoning=False, is_single=True).text
    for calls in (GOOD, TWO):
        if len(calls) > 1 and CALLS[name].between is None:
            continue
        text = written(name, calls)
        assert takes(tokenizer, several, text), text
        assert takes(tokenizer, single, text) is (len(calls) == 1)
        found = parsed(form, text)
        assert [(each.name, json.loads(each.arguments)) for each in found.calls] == calls and not found.content
    for calls in WRONG:
        assert not takes(tokenizer, several, written(name, calls))
    assert not takes(tokenizer, several, "Hello.")


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"llama3_json"}))
def test_content_of_a_schema_may_come_instead_of_a_call(tokenizer: LLTokenizer, name: str) -> None:
    form = AnswerFormat(CALLS[name], None)
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    grammar = answer_grammar(form, SCHEMAS, {}, is_reasoning=False, content=schema).text
    for text, is_right in (('{"a": 3}', True), ('{"a": "3"}', False), ("{}", False), ("Hello.", False)):
        assert takes(tokenizer, grammar, form.content_head + text) is is_right
    assert parsed(form, form.content_head + '{"a": 3}').content == '{"a": 3}'
    assert takes(tokenizer, grammar, written(name, GOOD))
    assert not any(takes(tokenizer, grammar, written(name, calls)) for calls in WRONG)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_a_model_begins_by_itself_matches_its_schema(tokenizer: LLTokenizer, name: str) -> None:
    form, call = AnswerFormat(CALLS[name], None), written(name, GOOD)
    grammar = answer_grammar(form, SCHEMAS, {}, is_reasoning=False, content="").text
    before = "The <sea>\nis {blue} [1]. " if CALLS[name].marker else ""
    for text in (f"{form.content_head}{before}", f"{form.content_head}Hello.", call, before + call):
        assert takes(tokenizer, grammar, text), text
    assert [each.name for each in parsed(form, before + call).calls] == ["look"]
    for calls in filter(None, WRONG):
        assert not takes(tokenizer, grammar, before + written(name, calls))


def test_json_comes_behind_reasoning(tokenizer: LLTokenizer) -> None:
    for name, head in (("qwen3", ""), ("openai_gptoss", "<|channel|>final<|message|>")):
        form, reasoning = AnswerFormat(None, REASONING[name]), REASONING[name]
        grammar = answer_grammar(form, {}, {}, is_reasoning=False, content='{"type": "boolean"}').text
        thought = f"{reasoning.start}It {{is}}.{reasoning.end}{reasoning.after}"
        for text in (f"{head}true", f"{thought}{head}true"):
            assert takes(tokenizer, grammar, text), text
            assert parsed(form, text).content == "true"
        assert not takes(tokenizer, grammar, f"{thought}{head}blue")


def test_content_that_cannot_be_told_from_a_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be told from a call"):
        answer_grammar(AnswerFormat(CALLS["llama3_json"], None), SCHEMAS, {}, is_reasoning=False, content="{}")


@pytest.mark.parametrize("schema", ["{", "[]", "true"])
def test_content_needs_a_schema_that_is_an_object(schema: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        answer_grammar(AnswerFormat(CALLS["hermes"], None), SCHEMAS, {}, is_reasoning=False, content=schema)


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_may_come_before_a_required_call(tokenizer: LLTokenizer, name: str) -> None:
    calls = "openai" if name == "openai_gptoss" else "hermes"
    form, reasoning = AnswerFormat(CALLS[calls], REASONING[name]), REASONING[name]
    thought = f"The <sea>, {{she}} says.{reasoning.end}{reasoning.after}"
    call = written(calls, GOOD)
    for is_open, answers in ((False, [call, f"{reasoning.start}{thought}{call}"]), (True, [f"{thought}{call}"])):
        if is_open and reasoning.channels is not None:
            continue
        grammar = answer_grammar(form, SCHEMAS, {}, is_reasoning=is_open, is_single=False).text
        for text in answers:
            assert takes(tokenizer, grammar, text), text
            found = parsed(form, text, is_reasoning=is_open)
            assert [each.name for each in found.calls] == ["look"] and not found.content
            assert bool(found.reasoning) == (text != call)
        assert not takes(tokenizer, grammar, "x" + call) or is_open


@pytest.mark.parametrize("name", CALLS)
def test_special_tokens_are_named_by_their_ids(name: str, tmp_path: Path) -> None:
    """In vocabularies that have the markers as special tokens, no text is one."""
    markers = [*dict.fromkeys(CALLS[name].markers)]
    write_tiny_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    first = max(each["id"] for each in saved["added_tokens"]) + 1
    first = max(first, len(saved["model"]["vocab"]))
    like = saved["added_tokens"][0]
    saved["added_tokens"] += [like | {"id": first + at, "content": each} for at, each in enumerate(markers)]
    tokenizer = LLTokenizer(json.dumps(saved))
    special = {each: first + at for at, each in enumerate(markers)}
    form = AnswerFormat(CALLS[name], None)
    grammar = answer_grammar(form, SCHEMAS, special, is_reasoning=False, is_single=False).text
    assert takes(tokenizer, grammar, written(name, GOOD))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "a+"}}},
        {"properties": {"a": {"type": "string", "minLength": '1}/ "'}}},
        {"properties": {"a": {"type": "string", "enum": 3}}},
        {"properties": ["a"]},
        {"properties": {}, "required": 3},
    ],
)
def test_what_a_format_cannot_enforce_is_refused(schema: Any) -> None:
    form = AnswerFormat(CALLS["glm45"], None)
    with pytest.raises(InvalidRequest, match=r"'look' have .* cannot be enforced"):
        answer_grammar(form, {"look": schema}, {}, is_reasoning=False, is_single=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_grammar_has_a_bound(name: str) -> None:
    """However large the schemas are: 64 KiB, before a longer text is made."""
    form = AnswerFormat(CALLS[name], None)
    long = {"properties": {f"p{at}": {"enum": [str(at), "x" * 300]} for at in range(240)}}
    with pytest.raises(InvalidRequest, match="grammar of more than 64 KiB"):
        answer_grammar(form, {"look": long}, {}, is_reasoning=False, is_single=True)
    around = {"type": "object", "properties": {f"p{at}": {"$ref": "#/$defs/x"} for at in range(9)}}
    with pytest.raises(InvalidRequest, match=r"grammar of more than 64 KiB|nested more than|more than 256 values"):
        many = {f"look{at}": {"properties": {"a": around}, "$defs": {"x": around, "y": "z" * 9999}} for at in range(20)}
        answer_grammar(form, many, {}, is_reasoning=False, is_single=True)


def test_nested_values_of_gemma_are_enforced_and_references_may_not_go_round(tokenizer: LLTokenizer) -> None:
    form = AnswerFormat(CALLS["gemma4"], None)
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    schema = {"properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/x"}}}, "$defs": {"x": inner}}
    grammar = answer_grammar(form, {"look": schema}, {}, is_reasoning=False, is_single=True).text
    text = "<|tool_call>call:look{a:[{b:true},{b:false}]}<tool_call|>"
    assert takes(tokenizer, grammar, text) and not takes(tokenizer, grammar, text.replace("true", "1"))
    assert json.loads(parsed(form, text).calls[0].arguments) == {"a": [{"b": True}, {"b": False}]}
    around = {
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}},
    }
    with pytest.raises(InvalidRequest, match="nested more than 16 levels"):
        answer_grammar(form, {"look": around}, {}, is_reasoning=False, is_single=True)
