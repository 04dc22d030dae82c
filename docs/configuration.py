"""The reference of all keys, from types and the words below their fields: `python docs/configuration.py` writes it.

Knows how a type reads in words and where a block stands in the file; what a key means is said beside it in the code.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cluster import spec
from cluster.spec_file import FILE_DEFAULTS, keys_of
from workers import config
from workers.costs import CostModel, LinearCost
from workers.request import SLO

PAGE = Path(__file__).resolve().parent / "reference" / "configuration.md"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->\n"
BLOCKS: dict[str, type] = {
    "": spec.ClusterSpec,
    "pools[]": spec.PoolSpec,
    "pools[].resources": spec.Resources,
    "pools[].parallel": config.ParallelConfig,
    "pools[].engine": config.EngineConfig,
    "pools[].cache": config.CacheConfig,
    "pools[].cache.disk": config.DiskCacheConfig,
    "pools[].cache.remote": config.RemoteCacheConfig,
    "pools[].cost": LinearCost,
    "transfer": config.TransferConfig,
    "gateway": spec.GatewaySpec,
    "gateway.slo": SLO,
    "gateway.classes.NAME": spec.ClassSpec,
    "health": spec.HealthSpec,
    "elastic": spec.ElasticSpec,
    "metrics": spec.MetricsSpec,
    "logs": spec.LogSpec,
    "tracing": spec.TracingSpec,
}
CHOICES: dict[tuple[type, str], tuple[str, ...]] = {
    (spec.ClusterSpec, "executor"): spec.EXECUTORS,
    (spec.GatewaySpec, "routing"): spec.ROUTING,
    (spec.GatewaySpec, "admission"): spec.ADMISSION,
    (spec.GatewaySpec, "tool_call_parser"): spec.TOOL_CALL_PARSERS,
    (spec.GatewaySpec, "reasoning_parser"): spec.REASONING_PARSERS,
    (spec.GatewaySpec, "pooling"): spec.POOLINGS,
    (spec.ClassSpec, "on_miss"): spec.ON_MISS,
    (spec.ElasticSpec, "mode"): spec.ELASTIC,
    (spec.MetricsSpec, "compat"): spec.COMPAT,
    (spec.LogSpec, "format"): spec.LOG_FORMATS,
    (spec.LogSpec, "level"): spec.LOG_LEVELS,
    (spec.TracingSpec, "otlp_protocol"): spec.OTLP_PROTOCOLS,
    (config.ParallelConfig, "placement"): config.PLACEMENTS,
    (config.TransferConfig, "backends"): config.BACKENDS,
    **{(config.EngineConfig, key): known for key, known in config.CHOICES.items()},
}
UNITS = {"_s": "seconds", "_bytes": "bytes", "_blocks": "blocks", "_tokens": "tokens", "port": "port"}
NUMBERS = {int: "integer", float: "number"}
PLAIN = {bool: "boolean", str: "string", config.ByteSize: "size, such as `8GiB`"}


def meanings(kind: type) -> dict[str, str]:
    """What stands in a string below each field of a dataclass."""
    (body,) = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    found = {}
    for node, below in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant), "only words stand below a field"
            found[node.target.id] = " ".join(str(below.value.value).split())
    return found


def reference() -> str:
    """A heading and a table for every block, as Markdown."""
    return "\n".join(_block(path, kind) for path, kind in BLOCKS.items())


def _block(path: str, kind: type) -> str:
    title = f"`{path}`" if path else "The file"
    about = re.sub(r" \(see .*?\)", "", (inspect.getdoc(kind) or "").partition("\n")[0])
    table = "".join(f"| `{key}` | {read} | {default} | {words} |\n" for key, read, default, words in rows(kind))
    return f"## {title}\n\n{about}\n\n| key | type | default | description |\n|---|---|---|---|\n{table}"


def rows(kind: type) -> Iterator[tuple[str, str, str, str]]:
    hints, words = get_type_hints(kind), meanings(kind)
    for each in [each for each in fields(kind) if each.name in keys_of(kind)]:
        said = re.sub(r"docs/([\w-]+\.md)", r"[\1](../\1)", words.get(each.name, ""))
        said = re.sub(r"docs/reference/([\w-]+\.md)", r"[\1](\1)", said)
        yield each.name, _read(kind, each.name, hints[each.name]), _default(kind, each), said


def _read(kind: type, key: str, hint: Any) -> str:
    """A type in the words of who writes YAML."""
    if get_origin(hint) is UnionType:
        (hint,) = [option for option in get_args(hint) if option is not NoneType]
    several = get_origin(hint) is tuple
    choices = CHOICES.get((kind, key), ())
    if several and not choices:
        of = get_args(hint)[0]
        return f"list of {'strings' if of is str else _link(of, 'blocks')}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = tuple(each.value for each in hint)
    if choices:
        names = ", ".join(f"`{each}`" for each in choices)
        return f"list of {names}" if several else f"one of {names}" if len(choices) > 1 else names
    if get_origin(hint) is dict:
        of = get_args(hint)[1]
        return f"map of names to {NUMBERS.get(of) or PLAIN.get(of) or _link(of, 'block')}"
    if hint in PLAIN:
        return PLAIN[hint]
    if hint in NUMBERS:
        return next((unit for end, unit in UNITS.items() if key.endswith(end)), NUMBERS[hint])
    return _link(LinearCost if hint is CostModel else hint, "block")


def _link(kind: Any, word: str) -> str:
    """To the heading of a block."""
    (path,) = [path for path, each in BLOCKS.items() if each is kind]
    return f"[{word}](#{re.sub(r'[^a-z]', '', path.lower())})"


def _default(kind: type, each: Field[Any]) -> str:
    if each.name in (of_files := FILE_DEFAULTS.get(kind, {})):
        return f"`{of_files[each.name]}`"
    if each.default is MISSING and each.default_factory is MISSING:
        return "required"
    value = each.default if each.default_factory is MISSING else each.default_factory()
    if value is None or type(value) in BLOCKS.values():
        return "unset" if value is None else ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def written(page: str) -> str:
    """The page with the tables as they should be."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + reference() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
