"""Grammars that enforce tool calls in the model's own format, so that its parser reads them. In llguidance's Lark."""

import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.frontend.tools.answer import Schemas
from cluster.frontend.tools.formats import AnswerFormat
from workers.request import Grammar

# As for other structured output (`workers.model.grammar`).
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{0,20}", "lenient": False}


def call_grammar(
    form: AnswerFormat, schemas: Schemas, special: Mapping[str, int], *, is_reasoning: bool, is_single: bool
) -> Grammar:
    """One call or more of these tools, after reasoning if the model reasons. `special`: ids of special tokens.

    `is_reasoning`: the prompt has begun the reasoning. `is_single`: one call.
    """
    calls, reasoning = form.calls, form.reasoning
    assert calls is not None, "callers have checked"
    terms = _Terms(special)
    rules = [f"call: {' | '.join(f'call{index}' for index in range(len(schemas)))}"]
    for index, (name, schema) in enumerate(schemas.items()):
        opened, closed = terms(calls.open.replace("NAME", name)), terms(calls.close)
        rules += [f"call{index}: {opened} arguments{index} {closed}", f"arguments{index}: {_json(schema)}"]
    more = "" if is_single else f"({terms(calls.between)} call)*"
    start = f"{terms(calls.begin)} call {more} {terms(calls.end)}"
    if reasoning is not None:
        thought = f"thought {terms(reasoning.end) if reasoning.end in special else ''}"
        start = f"{thought if is_reasoning else f'({terms(reasoning.start)} {thought})?'} SPACE {start}"
        stop = "" if reasoning.end in special else f"[suffix={_quoted(reasoning.end)}]"
        rules += [f"thought{stop}: /(?s:.*)/", r"SPACE: /[ \n]{0,4}/"]
    return Grammar("lark", "\n".join([f"start: {start}", *rules]))


class _Terms:
    """Writes a text as terms of a rule; special tokens have no text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def __call__(self, text: str) -> str:
        plain = self._pattern.split(text)
        found = [f"<[{self._special[token]}]>" for token in self._pattern.findall(text)]
        return " ".join(
            term for pair in zip(plain, [*found, ""], strict=True) for term in (_quoted(pair[0]), pair[1]) if term
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'type': 'object', **schema, 'x-guidance': JSON_OPTIONS})}"
