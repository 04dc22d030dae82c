"""`/openapi.json` as one HTML page, which loads nothing from elsewhere and has no script. Pure."""

from collections.abc import Iterator, Mapping
from html import escape
from json import dumps
from typing import Any

Schema = Mapping[str, Any]
STYLE = """
:root { color-scheme: light dark; --soft: #667080; --line: #8884; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem 1.4rem 4rem; font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin: 1.8rem 0 .3rem; font-family: monospace; }
p, small { color: var(--soft); margin: .2rem 0; } details { margin: .4rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; }
td, th { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
td:first-child { font-family: monospace; white-space: nowrap; } .off td:first-child { text-decoration: line-through; }
"""
# Nothing is loaded, and nothing runs.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"


def docs_page(document: Schema) -> str:
    """The page of an OpenAPI document: each path with the fields of its body."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(document["info"]["title"])}: HTTP API</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><h1>{escape(document["info"]["title"])}: HTTP API</h1>
<p>What this server accepts, from the checks that it makes. As JSON: <a href="openapi.json">openapi.json</a>.</p>
{"".join(_paths(document))}</body></html>
"""


def _paths(document: Schema) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    shown: dict[str, None] = {}  # objects inside bodies
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2>"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                schema = schemas[_name(body)]
                shown |= dict.fromkeys(_inside(schema))
                yield _fields(schema)
    for name in shown:
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2>{_fields(schemas[name])}'


def _fields(schema: Schema) -> str:
    """Supported fields, and those that are refused behind a fold."""
    properties: Mapping[str, Schema] = schema.get("properties", {})
    required = schema.get("required", ())
    description = str(schema.get("description", ""))
    text = "" if description.startswith("POST /") and "\n" not in description else f"<p>{escape(description)}</p>"
    supported = [_row(name, each, name in required) for name, each in properties.items() if not _is_off(each)]
    refused = [_row(name, each, False) for name, each in properties.items() if _is_off(each)]
    text += _table(supported)
    if refused:
        text += f"<details><summary>{len(refused)} fields that are not supported</summary>{_table(refused)}</details>"
    return text


def _table(rows: list[str]) -> str:
    return f"<table><tr><th>field<th>type<th></tr>{''.join(rows)}</table>"


def _row(name: str, schema: Schema, is_required: bool) -> str:
    text = escape(str(schema.get("description", ""))) if not is_required else "Required."
    kind = ' class="off"' if _is_off(schema) else ""
    return f"<tr{kind}><td>{escape(name)}<td>{_type(schema)}<td>{text}</tr>"


def _is_off(schema: Schema) -> bool:
    return "enum" in schema


def _type(schema: Schema) -> str:
    """The type and its bounds, as HTML."""
    if "enum" in schema:
        return ", ".join(f"<code>{escape(dumps(each))}</code>" for each in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        name = escape(_name(schema))
        return f'<a href="#{name}">{name}</a>'
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    least = f" {'above' if 'exclusiveMinimum' in schema else 'from'} {low:g}" if low is not None else ""
    return escape(str(schema.get("type", "any"))) + least + (f" to {high:g}" if high is not None else "")


def _inside(schema: Schema) -> Iterator[str]:
    """The names of the objects in a schema's properties."""
    for each in schema.get("properties", {}).values():
        for option in (each, *each.get("anyOf", ())):
            for found in (option, option.get("items", {})):
                if "$ref" in found:
                    yield _name(found)


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]
