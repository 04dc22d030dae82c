"""Renders a model's chat template as `transformers` does, without its import, which takes over a second.

Templates come with the model and are untrusted: they run in Jinja's sandbox, with the same further limits.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

Templates = str | Mapping[str, str]


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what the model wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


class _Dict:
    """`dict` with only these two methods, since the type itself has more."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Takes no attribute that starts with an underscore: some give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may name an attribute `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}; rename it")


def render(
    templates: Templates,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation. All values are plain JSON. Of several templates, tools select "tool_use".

    Raises `jinja2.TemplateError`, and whatever the template's expressions raise.
    """
    template = templates if isinstance(templates, str) else _chosen(templates, bool(tools))
    return _compiled(template).render(
        messages=[_message(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        documents=None,
        **variables,
    )


class _Arguments(dict[str, Any]):
    """The arguments of a call. Most templates expect an object; to those that expect its JSON, it is a text."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(given)
    if "tool_calls" in message:
        message["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _Arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _chosen(templates: Mapping[str, str], has_tools: bool) -> str:
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        raise ValueError(f"there is none called default; there are {', '.join(sorted(templates))}")
    return templates["default"]


@cache
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


@cache
def environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
