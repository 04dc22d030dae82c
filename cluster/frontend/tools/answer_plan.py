"""How the answers of a chat are constrained and read, by what its model writes and its request asks for.

Grammars have tool calls in the model's own format, so that its parser reads them, and content of a schema; in
llguidance's Lark. Pure.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.frontend.one_of import with_any_of
from cluster.frontend.text import Tokenizer, text_from
from cluster.frontend.tools.answer import Schemas
from cluster.frontend.tools.formats import CALLS, AnswerFormat, AnswerParser, CallFormat, Pairs, answer_format
from workers.errors import InvalidRequest
from workers.request import MAX_GRAMMAR_BYTES, Grammar

LAST_TOKENS = 32  # of a prompt; where its template has begun the reasoning, they say so
NO_PARSER = (
    "cannot be called: this model's chat template has no known format of calls; leave them out, set tool_choice to "
    f"none, or serve with gateway.tool_call_parser (or --tool-call-parser): {', '.join(CALLS)}"
)
# As for other structured output (`workers.model.grammar`).
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{0,20}", "lenient": True}
NO_RULES = {"type", "title", "description", "default", "examples", "minLength", "maxLength", "enum", "const"}
MAX_VALUES, MAX_DEPTH = 256, 16  # of a tool's values: references may go round
NOT_ENFORCED = "set tool_choice to auto without strict and response_format"
SCALARS = ("number", "integer", "boolean", "null")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Which tools an answer may call. `must_call`: it has a call, and nothing besides reasoning. `is_strict`: the
    arguments of all calls match their schemas.
    """

    schemas: Schemas
    must_call: bool = False
    is_strict: bool = False
    max_calls: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`make_parser`: of one answer; None: all its text is content. `grammar`: of all of it. `keep`: the special tokens
    whose text the parser needs."""

    make_parser: Callable[[], AnswerParser] | None = None
    grammar: Grammar | None = None
    keep: Collection[int] = ()


class AnswerPlanner:
    """Plans the answers of one model. `calls` and `reasoning`: its formats, as for `answer_format`."""

    def __init__(self, tokenizer: Tokenizer, calls: str, reasoning: str) -> None:
        template = tokenizer.info.get("chat_template")
        texts = template.values() if isinstance(template, dict) else [template or ""]
        self._tokenizer = tokenizer
        self._format = answer_format("\n".join(texts), calls, reasoning)

    @property
    def needs_prompt(self) -> bool:
        """Whether `plan` needs the prompt's tokens."""
        return self._format.reasoning is not None

    @property
    def reads_calls(self) -> bool:
        """Whether the model can call tools."""
        return self._format.calls is not None

    def plan(self, tools: ToolRequest | None, wanted: Grammar | None, prompt: Sequence[int] = ()) -> AnswerPlan:
        """`wanted`: of the content; JSON comes behind reasoning, or a tool call comes instead of it.

        Raises `InvalidRequest` for tools that this model cannot call.
        """
        form, reasoning = self._format, self._format.reasoning
        if tools is None:
            form, tools = AnswerFormat(None, reasoning), ToolRequest({})
        elif form.calls is None:
            raise InvalidRequest("tools", NO_PARSER)
        if form.calls is None and reasoning is None:
            return AnswerPlan()
        is_reasoning = reasoning is not None and reasoning.is_open(text_from(self._tokenizer, prompt[-LAST_TOKENS:]))
        ids = self._tokenizer.special_ids
        special = {each: ids[each] for each in form.markers if each in ids}
        parser = partial(AnswerParser, form, tools.schemas, is_reasoning=is_reasoning, max_calls=tools.max_calls)
        content = wanted.text if wanted is not None and wanted.kind == "json" else None
        grammar = None
        if tools.must_call or tools.is_strict or content is not None:
            grammar = answer_grammar(
                form,
                tools.schemas,
                special,
                is_reasoning=is_reasoning,
                is_single=tools.max_calls == 1,
                content=None if tools.must_call else content or "",
            )
        return AnswerPlan(parser, grammar, special.values())


def answer_grammar(
    form: AnswerFormat,
    schemas: Schemas,
    special: Mapping[str, int],
    *,
    is_reasoning: bool,
    is_single: bool = False,
    content: str | None = None,
) -> Grammar:
    """Reasoning if the model reasons, and then one call or more of these tools, or content.

    `special`: ids of special tokens. `is_reasoning`: the prompt has begun the reasoning. `is_single`: one call.
    `content`: None: there is none; a JSON schema: there may be this instead of calls; empty: any text, also before
    calls if their format has a marker. Raises `InvalidRequest` for a schema that the format of calls cannot enforce.
    """
    rules, calls, reasoning = _Rules(special), form.calls, form.reasoning
    if content and calls is not None and (calls.begin + calls.open).startswith("{"):
        why = "cannot be told from a call in this model's format of calls, which is JSON too"
        raise InvalidRequest("sampling.grammar", f"{why}; leave it out, or set tool_choice to none or required")
    answers = [] if calls is None else [_calls(rules, calls, schemas, is_single, is_late=content == "")]
    if content is not None:
        text = "/(?s:.)*/" if content == "" else _content_json(content)
        if content == "" and calls is not None and not calls.marker and not form.content_head:
            text = rf"/((?s:[^\s{re.escape((calls.begin + calls.open)[0])}].*))?/"  # the first letter tells
        answers.append(f"{rules.terms(form.content_head)} {rules.new(text)}")
    start = " | ".join(answers)
    if reasoning is not None:
        thought = f"{rules.text_until(reasoning.end)} {rules.terms(reasoning.after)}"
        start = f"{thought if is_reasoning else f'({rules.terms(reasoning.start)} {thought})?'} SPACE ({start})"
        rules.add("SPACE", r"/[ \n]{0,4}/")
    rules.add("start", start)
    return Grammar("lark", "\n".join(rules.lines))


def _calls(rules: "_Rules", calls: CallFormat, schemas: Schemas, is_single: bool, *, is_late: bool) -> str:
    """One call or more. `is_late`: behind any text that does not contain their marker, if they have one."""
    marked = "" if calls.begin else calls.marker  # what each call begins with
    for index, (name, schema) in enumerate(schemas.items()):
        arguments = _json(schema) if calls.arguments is None else _Written(rules, calls.arguments, name, schema).all()
        opened = rules.terms(calls.open.replace("NAME", name).removeprefix(marked))
        rules.add(f"call{index}", f"{opened} {rules.new(arguments)} {rules.terms(calls.close)}")
    rules.add("call", " | ".join(f"call{index}" for index in range(len(schemas))))
    more = "" if is_single or calls.between is None else f"({rules.terms(calls.between + marked)} call)*"
    begin = calls.begin or marked
    first = rules.terms(begin)
    if is_late and calls.marker:
        first = f"{rules.text_until(calls.marker)} {rules.terms(begin.removeprefix(calls.marker))}"
    return f"{first} call {more} {rules.terms(calls.end)}"


class _Rules:
    """The rules of a grammar. Special tokens have no text: terms name them by their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._special = special
        self._num_chars = 0
        self._pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def add(self, name: str, body: str) -> None:
        self._num_chars += len(body)
        if self._num_chars > MAX_GRAMMAR_BYTES:
            why = f"need a grammar of more than {MAX_GRAMMAR_BYTES >> 10} KiB"
            raise InvalidRequest("tools", f"{why}; send fewer or simpler ones, or {NOT_ENFORCED}")
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
        if self._num_values > MAX_VALUES or self._depth > MAX_DEPTH:
            raise self._refused(f"more than {MAX_VALUES} values, or are nested more than {MAX_DEPTH} levels deep")
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
        return InvalidRequest("tools", f"{why}; simplify it, or {NOT_ENFORCED}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _content_json(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("sampling.grammar", f"cannot be read: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("sampling.grammar", "cannot be read: a JSON schema is an object")
    return _json(schema, {})


def _json(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> str:
    """JSON of a schema. `root`: the one that it is part of; None: it is one of arguments, which are an object."""
    around: Mapping[str, Any] = {"type": "object"}
    if root is not None:
        has_refs = "$ref" in json.dumps(schema)
        around = {key: root[key] for key in ("$defs", "definitions") if has_refs and key in root}
    return f"%json {json.dumps({**with_any_of({**around, **schema}), 'x-guidance': JSON_OPTIONS})}"
