"""Parsers of answers: the parts do not depend on how the text is cut, and no text is lost or makes one fail."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.frontend.tools.answer import AnswerDelta
from cluster.frontend.tools.formats import CALLS, REASONING, AnswerFormat, AnswerParser, answer_format
from cluster.spec import REASONING_PARSERS, TOOL_CALL_PARSERS

SCHEMAS: dict[str, Any] = {
    "look": {"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}},
    "wait": {"type": "object", "properties": {}},
}
LOOK = {"at": 'the "sea" {[</tool_call>\\', "times": 3}
# A text in each format, and its content and calls.
WRITTEN: dict[str, list[tuple[str, str, list[tuple[str, dict[str, Any]]]]]] = {
    "hermes": [
        (
            f'I look.\n<tool_call>\n{{"name": "look", "arguments": {json.dumps(LOOK)}}}\n</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "wait"}</tool_call>\n',
            "I look.\n",
            [("look", LOOK), ("wait", {})],
        ),
        ('<tool_call>{"name": "wait"}</tool_call> Done.', "Done.", [("wait", {})]),
        ('<tool_call>{"id": [1, "}"], "name": "wait", "arguments": "{}"}</tool_call>', "", [("wait", {})]),
        ('<tool_call>[{"name": "wait"}, {"name": "look"}]</tool_call>', "", [("wait", {}), ("look", {})]),
        ("a <tool_call></tool_call>", "a <tool_call></tool_call>", []),
        ("a <tool_call> b </tool_call>", "a <tool_call> b </tool_call>", []),
        ('<tool_call><tool_call>{"name": "wait"}', "<tool_call>", [("wait", {})]),
    ],
    "llama3_json": [
        (
            f'{{"name": "look", "parameters": {json.dumps(LOOK)}}}; {{"parameters": {{}}, "name": "wait"}}',
            "",
            [("look", LOOK), ("wait", {})],
        ),
        ('<|python_tag|>{"name": "wait", "parameters": {}} Done.', "Done.", [("wait", {})]),
        ('{"name": "wait", "parameters": {}}; Done.', "; Done.", [("wait", {})]),
        ('{"name": "Ann", "parameters": {"age": 3}}', '{"name": "Ann", "parameters": {"age": 3}}', []),
        ('{"name": "wait"}', '{"name": "wait"}', []),
        (" {", " {", []),
        ('I look. <|python_tag|>{"name": "wait", "parameters": {}}', "I look. ", [("wait", {})]),
        ('a <|python_tag|>{"name": "Ann"}', 'a <|python_tag|>{"name": "Ann"}', []),
    ],
    "mistral": [
        (
            f'I look.[TOOL_CALLS] [{{"name": "look", "arguments": {json.dumps(LOOK)}}}, {{"name": "wait", "arguments": '
            '{}, "id": "123456789"}]',
            "I look.",
            [("look", LOOK), ("wait", {})],
        ),
        ("[TOOL_CALLS]look{}", "", [("look", {})]),
        ("[TOOL_CALLS] look", "[TOOL_CALLS] look", []),
    ],
    "mistral_args": [
        (
            f"[TOOL_CALLS]look[CALL_ID]123[ARGS]{json.dumps(LOOK)}[TOOL_CALLS]wait[ARGS]{{}}",
            "",
            [("look", LOOK), ("wait", {})],
        ),
        ("[TOOL_CALLS]look[ARGS]3", "[TOOL_CALLS]look[ARGS]3", []),
    ],
    "deepseek_v3": [
        (
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
            + json.dumps(LOOK)
            + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "I look.",
            [("look", LOOK), ("wait", {})],
        ),
        ("<｜tool▁call▁begin｜>look", "<｜tool▁call▁begin｜>look", []),
    ],
    "deepseek_v31": [
        (
            f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{json.dumps(LOOK)}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "I look.",
            [("look", LOOK), ("wait", {})],
        ),
    ],
    "glm45": [
        (
            'I look.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the "sea" {</arg_value>\n'
            "<arg_key>times</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>wait\n</tool_call>",
            "I look.\n",
            [("look", {"at": 'the "sea" {', "times": 3}), ("wait", {})],
        ),
        ("<tool_call>look<arg_key>at</arg_key><arg_value>3</arg_value></tool_call>", "", [("look", {"at": "3"})]),
        ("<tool_call>look<arg_key>at</arg_key><arg_value> a\n</arg_value></tool_call>", "", [("look", {"at": " a\n"})]),
        ("<tool_call>look at", "<tool_call>look at", []),
    ],
    "qwen3_coder": [
        (
            "I look.\n<tool_call>\n<function=look>\n<parameter=at>\nthe sea\n  {\n</parameter>\n<parameter=times>\n3\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=wait>\n</function>\n</tool_call>",
            "I look.\n",
            [("look", {"at": "the sea\n  {", "times": 3}), ("wait", {})],
        ),
        ("<tool_call><function=>", "<tool_call><function=>", []),
        ("<function=wait>\n</function>\n</tool_call>", "", [("wait", {})]),
        ("Use <function=go> or", "Use <function=go> or", []),
        (
            "<tool_call><function=look><parameter=at>a</parameter><parameter=times>None</parameter></function></tool_call>",
            "",
            [("look", {"at": "a", "times": None})],
        ),
        (
            "<tool_call>\n<function=look>\n<parameter=at>\na </parameter> <parameter=\n</parameter>\n</function>",
            "",
            [("look", {"at": "a </parameter> <parameter="})],
        ),
        (  # nothing ends the values
            "<tool_call>\n<function=look>\n<parameter=at>\na\n<parameter=times>\n3\n</function>\n</tool_call> Done.",
            "Done.",
            [("look", {"at": "a", "times": 3})],
        ),
        (
            "<tool_call>\n<function=look>\n<parameter=at>\na</parameter>\n<parameter=all>\n</parameter>\n</function>",
            "",
            [("look", {"at": "a", "all": ""})],
        ),
    ],
    "pythonic": [
        (
            "[look(at='the \"sea\" ([)', times=-3), wait(), look(at=\"it's\", all=[True, null, {'a': 1.5}])]",
            "",
            [
                ("look", {"at": 'the "sea" ([)', "times": -3}),
                ("wait", {}),
                ("look", {"at": "it's", "all": [True, None, {"a": 1.5}]}),
            ],
        ),
        ("<|python_start|>[wait()]<|python_end|>", "", [("wait", {})]),
        ("[1, 2]", "[1, 2]", []),
        ("[look(at=go())]", "[look(at=go())]", []),
        ("[look(1e999)]", "[look(1e999)]", []),
        ("[look(at=1e999)]", "[look(at=1e999)]", []),
    ],
    "gemma4": [
        (
            'I look.<|tool_call>call:look{at:<|"|>the "sea" {<|"|>,times:3,all:[true,{a:<|"|>b<|"|>}]}<tool_call|>'
            "<|tool_call>call:wait{}<tool_call|>",
            "I look.",
            [("look", {"at": 'the "sea" {', "times": 3, "all": [True, {"a": "b"}]}), ("wait", {})],
        ),
        (
            '<|tool_call>call:look{ at: <|"|>a<|"|> , all: [ 1, {b c:2, d:<|"|><|"|>} ] }<tool_call|>',
            "",
            [("look", {"at": "a", "all": [1, {"b c": 2, "d": ""}]})],
        ),
        ("<|tool_call>call:look", "<|tool_call>call:look", []),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:look{at:<escape>the sea<escape>,times:3}<end_function_call>"
            "<start_function_call>call:wait{}<end_function_call>",
            "",
            [("look", {"at": "the sea", "times": 3}), ("wait", {})],
        ),
    ],
    "openai": [
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
            f"<|constrain|>json<|message|>{json.dumps(LOOK)}<|call|><|start|>assistant to=functions.wait<|channel|>"
            "commentary json<|message|>{}<|call|>",
            "I look.",
            [("look", LOOK), ("wait", {})],
        ),
        (" to=functions.wait<|channel|>commentary json<|message|>{}", "", [("wait", {})]),
        (
            '<|channel|>commentary to=functions.look<|message|>{"at": "<|call|> <|start|>"}<|call|>',
            "",
            [("look", {"at": "<|call|> <|start|>"})],
        ),
        ("<|channel|>final<|message|>Done.<|return|>", "Done.", []),
        ("Done.", "Done.", []),
    ],
}
CASES = [(name, *case) for name, cases in WRITTEN.items() for case in cases]


def parsed(form: AnswerFormat, pieces: Sequence[str], **options: Any) -> AnswerDelta:
    parser = AnswerParser(form, SCHEMAS, **options)
    found = AnswerDelta()
    for piece in pieces:
        found = found.joined(parser.push(piece))
    return found.joined(parser.flush())


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def form(calls: str) -> AnswerFormat:
    return AnswerFormat(CALLS[calls], REASONING["openai_gptoss" if calls == "openai" else "deepseek_r1"])


def test_every_format_has_a_name_in_the_cluster_file_and_a_test() -> None:
    assert ("auto", "none", *CALLS) == TOOL_CALL_PARSERS and ("auto", "none", *REASONING) == REASONING_PARSERS
    assert set(WRITTEN) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_format_is_found_by_the_markers_of_a_template(name: str) -> None:
    """The first of those that share markers is the one with most of them."""
    assert answer_format(" ".join(CALLS[name].signs), "auto", "none").calls is CALLS[name]
    assert answer_format("{{ messages }}", "auto", "auto") == AnswerFormat(None, None)
    assert answer_format("{{ messages }}", name, "none").calls is CALLS[name]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_text_has_its_content_and_calls_however_it_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    whole = parsed(form(name), [text])
    assert (whole.content, whole.reasoning) == (content, "")
    assert [(each.name, json.loads(each.arguments)) for each in whole.calls] == calls
    assert parsed(form(name), list(text)) == whole
    for place in range(len(text)):
        assert parsed(form(name), cut(text, [place])) == whole


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_parses_and_does_not_depend_on_its_cuts(name: str, data: st.DataObject) -> None:
    calls = CALLS[name]
    parts = [
        calls.open.replace("NAME", "look"),
        calls.close,
        calls.begin,
        calls.end,
        *calls.markers,
        "<think>",
        "</think>",
    ]
    words = st.sampled_from([*parts, *(part[:3] for part in parts), '{"a": "b\\"', "}", "[", '"', "\\", ",", " ", "\n"])
    pieces = data.draw(st.lists(words | st.text(max_size=8), max_size=12))
    text = "".join(pieces)
    is_reasoning = data.draw(st.booleans())
    whole = parsed(form(name), [text], is_reasoning=is_reasoning)
    places = data.draw(st.lists(st.integers(0, 400), max_size=20))
    assert parsed(form(name), pieces, is_reasoning=is_reasoning) == whole
    assert parsed(form(name), cut(text, places), is_reasoning=is_reasoning) == whole


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["alpha", "beta", "Z", "1", "é"]) | st.sampled_from([" ", "\n", ". "]), max_size=12))
def test_text_without_markers_is_content(name: str, words: list[str]) -> None:
    text = "".join(words)
    assert parsed(form(name), words) == AnswerDelta(text)


@pytest.mark.parametrize("name", CALLS)
def test_words_around_and_inside_of_broken_calls_are_kept(name: str) -> None:
    """No word is lost, wherever a call breaks off."""
    text, *_ = WRITTEN[name][0]
    for place in range(1, len(text)):
        found = parsed(form(name), [f"first {text[:place]}"])
        assert found.content.startswith("first")
        if "look" in text[:place]:
            assert "look" in found.content + "".join(each.name for each in found.calls)


@pytest.mark.parametrize(
    ("text", "is_reasoning", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes", False, "hm\n", "Yes"),
        ("hm</think>Yes", True, "hm", "Yes"),
        ("hm", True, "hm", ""),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        (" Yes <think>no</think>", False, "", " Yes <think>no</think>"),
        (" \n", False, "", " \n"),
    ],
)
def test_reasoning_comes_first_and_apart(text: str, is_reasoning: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert parsed(form("hermes"), pieces, is_reasoning=is_reasoning) == AnswerDelta(content, reasoning)


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("mistral", "[THINK]hm[/THINK]Yes", "hm", "Yes"),
        ("gemma4", "<|channel>thought\nhm\n<channel|>Yes", "hm\n", "Yes"),
        (
            "openai_gptoss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
            "hm",
            "Yes",
        ),
    ],
)
def test_each_format_of_reasoning(name: str, text: str, reasoning: str, content: str) -> None:
    plain = AnswerFormat(None, REASONING[name])
    for pieces in ([text], list(text)):
        assert parsed(plain, pieces) == AnswerDelta(content, reasoning)
    assert answer_format(" ".join(REASONING[name].signs), "auto", "auto").reasoning is REASONING[name]


def test_after_the_last_call_that_is_wanted_the_text_is_dropped() -> None:
    text, *_ = WRITTEN["hermes"][0]
    found = parsed(form("hermes"), [text + "And more."], max_calls=1)
    assert (found.content, [each.name for each in found.calls]) == ("I look.\n", ["look"])


@pytest.mark.parametrize("name", CALLS)
def test_a_long_answer_is_read_once(name: str) -> None:
    """The work of a piece does not grow with the text before it: what the parser keeps is bounded by its markers."""
    calls = CALLS[name]
    parser = AnswerParser(form(name), SCHEMAS)
    parser.push(calls.begin + calls.open.replace("NAME", "look") + '{"at": "')
    for _ in range(2000):
        parser.push("word ")
        assert len(parser._text._text) < 100
    parser = AnswerParser(form(name), SCHEMAS)
    for _ in range(2000):
        parser.push("word <")
        assert len(parser._text._text) < 100
