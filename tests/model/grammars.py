"""Grammars that a tiny model's garbage completes in a few tokens, and what an answer must be."""

import json
import re
from typing import Any

import jsonschema

from workers.request import Grammar

NAME = {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": NAME,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blü"]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"const": None}, {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 2}]},
    {
        "$defs": {"pair": {"type": "array", "prefixItems": [NAME, {"type": "boolean"}], "items": False, "minItems": 2}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/pair"}, "right": {"$ref": "#/$defs/pair"}},
        "required": ["left"],
        "additionalProperties": False,
    },
    {"type": "string", "format": "date"},
)
OTHERS = (
    Grammar("regex", r"(ab|c{2,5}é?){1,6}"),
    Grammar("choice", json.dumps(["yes", "yes, but", "no\n", '"', "漢字"])),
    Grammar("lark", 'start: item ("," item){0,3}\nitem: /[0-9]/ | "(" start ")"'),
)
GRAMMARS = (*(Grammar("json", json.dumps(schema)) for schema in SCHEMAS), *OTHERS)


def check_answer(grammar: Grammar, text: str) -> None:
    """Raises unless the text matches."""
    match grammar.kind:
        case "json":
            jsonschema.validate(json.loads(text), json.loads(grammar.text), jsonschema.Draft202012Validator)
        case "choice":
            assert text in json.loads(grammar.text)
        case "regex":
            assert re.fullmatch(grammar.text, text), text
        case _:
            assert re.fullmatch(r"[0-9,()]+", text) and text.count("(") == text.count(")"), text
