"""Reads a cluster file: YAML to a `ClusterSpec`. A wrong key or value is one `SpecError` with file, line and path."""

import difflib
import re
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import yaml

from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role, SpecError
from workers.config import ByteSize, EngineConfig
from workers.costs import CostModel, LinearCost
from workers.request import SLO

MAX_BYTES = 1 << 20  # YAML takes 10 s to read them
MAX_VALUES = 100_000
_POOL = re.compile(r"pools\[(\d+)\]")

# Defaults of a cluster file (docs/decisions/0044-default-policies.md). The types themselves default to the
# plain policies, which the baselines use.
FILE_DEFAULTS: dict[type, dict[str, Any]] = {
    GatewaySpec: {"routing": "slo", "admission": "slo"},
    EngineConfig: {"batching": "adaptive", "kv_blocks": 0},
}
# Fields of requests' SLOs that the gateway sets, so that a file has no such keys.
SET_BY_GATEWAY: dict[type, frozenset[str]] = {SLO: frozenset({"class_name", "priority", "is_enforced"})}


def keys_of(block: Any) -> list[str]:
    """The keys that a cluster file may have in this block, which is a dataclass."""
    return [each.name for each in fields(block) if each.name not in SET_BY_GATEWAY.get(block, ())]


def laptop_spec() -> ClusterSpec:
    """One prefill and one decode worker on this machine; the same as examples/laptop.yaml."""
    small = EngineConfig(kv_blocks=384, max_batch_tokens=256, batching=FILE_DEFAULTS[EngineConfig]["batching"])
    return ClusterSpec(
        name="laptop",
        model="smollm2-135m",
        pools=(
            PoolSpec("prefill", Role.PREFILL, engine=small),
            PoolSpec("decode", Role.DECODE, engine=replace(small, kv_blocks=768)),
        ),
        gateway=GatewaySpec(**FILE_DEFAULTS[GatewaySpec]),
    )


def load_spec(path: str | Path) -> ClusterSpec:
    """Read a YAML file. Raises `SpecError`."""
    text = _text_of(path)
    try:
        root = yaml.compose(text)
        if _is_large(root):
            raise SpecError(f"{path}: has more than {MAX_VALUES} values, with its aliases expanded; write less")
        document = yaml.safe_load(text)
    except RecursionError:
        raise SpecError(f"{path}: is nested too deep; no key of a cluster file is") from None
    except yaml.YAMLError as error:
        raise SpecError(_not_yaml(str(path), error)) from None
    try:
        _refuse_repeated_keys(root, "")
        return parse_spec(document)
    except SpecError as error:
        raise SpecError(located(str(path), text, str(error))) from None


def _text_of(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise SpecError(f"{path}: has more than {MAX_BYTES >> 20} MiB; give the path of a cluster YAML file")
        return raw.decode()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give the path of a cluster YAML file") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: is not UTF-8 text; give the path of a cluster YAML file") from None


def _is_large(root: yaml.Node | None) -> bool:
    """Whether it has more than `MAX_VALUES` values. An alias that contains itself has infinitely many."""
    nodes, count = [root], 0
    while nodes and count <= MAX_VALUES:
        node = nodes.pop()
        count += 1
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            nodes += (value for _, value in node.value)
    return count > MAX_VALUES


def _not_yaml(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f"{path}: is not YAML: {' '.join(str(error).split())}"
    why = ", ".join(part for part in (error.context, error.problem) if part)
    return f"{path}:{mark.line + 1}: is not YAML: {why}; check the indentation and the quotes there"


def _refuse_repeated_keys(node: Any, path: str) -> None:
    """YAML's reader would take the last one of them."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _refuse_repeated_keys(value, f"{path}[{index}]")
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            where, line = (f"{path}.{key.value}" if path else str(key.value)), key.start_mark.line + 1
            if key.value in lines:
                raise SpecError(f"{where}: is there twice, in lines {lines[key.value]} and {line}; keep one")
            lines[key.value] = line
            _refuse_repeated_keys(value, where)


def parse_spec(document: object) -> ClusterSpec:
    """Build the spec from plain dicts, lists and scalars. Raises `SpecError`."""
    if not isinstance(document, dict):
        raise SpecError("is empty or not a mapping; it must at least have model and pools")
    _refuse_unknown_keys(document, ClusterSpec, "")
    filled: dict[str, Any] = dict(_filled(document, "gateway", FILE_DEFAULTS[GatewaySpec]))
    if isinstance(pools := filled.get("pools"), list):
        pools = [_bounded(pool, f"pools[{index}]") for index, pool in enumerate(pools)]
        if any(isinstance(pool, dict) and pool.get("max_replicas") is not None for pool in pools):
            filled = _filled(filled, "elastic", {"mode": "act"})
        filled["pools"] = [_filled(pool, "engine", FILE_DEFAULTS[EngineConfig]) for pool in pools]
    elastic = filled.get("elastic")
    if isinstance(elastic, dict) and elastic.get("mode") is False:  # as YAML reads a bare off
        filled["elastic"] = elastic | {"mode": "off"}
    spec: ClusterSpec = _convert(filled, ClusterSpec, "")
    return spec


def _filled(block: Any, key: str, defaults: dict[str, Any]) -> Any:
    """Add defaults to the block under `key`; its own values win. A wrong type stays, for an error that names it."""
    if not isinstance(block, dict) or not isinstance(given := block.get(key, {}), dict):
        return block
    return {**block, key: defaults | given}


def _convert(value: object, kind: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=_custom)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {_readable(str(error))}" if path else _readable(str(error))) from None


def _bounded(pool: object, path: str) -> object:
    """Expand `replicas: {min, max}` of a pool to its fields. Raises `SpecError`."""
    if not isinstance(pool, dict) or not isinstance(replicas := pool.get("replicas"), dict):
        return pool
    right = "write replicas: {min: 1, max: 4}, or a number"
    for key in ("min_replicas", "max_replicas"):
        if key in pool:
            raise SpecError(f"{path}.{key}: replicas has bounds already; {right}")
    for key, value in replicas.items():
        if key not in ("min", "max"):
            raise SpecError(f"{path}.replicas.{key}: unknown key; {right}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"{path}.replicas.{key}: Expected int, got {type(value).__name__}; {right}")
    if len(replicas) < 2:
        raise SpecError(f"{path}.replicas: has only {', '.join(map(str, replicas)) or 'nothing'}; {right}")
    least, most = replicas["min"], replicas["max"]
    return pool | {"replicas": least, "min_replicas": least, "max_replicas": most}


def _refuse_unknown_keys(value: object, expected: Any, path: str) -> None:
    """Walk value and type together. msgspec would ignore a misspelled key; the error names it and the nearest one.

    Of a value that is none of an enumeration, msgspec does not name those that are.
    """
    if isinstance(expected, type) and issubclass(expected, Enum):
        known = [each.value for each in expected]
        if value not in known:
            raise SpecError(f"{path}: {value!r} is not one of {', '.join(known)}")
    options = [option for option in get_args(expected) if is_dataclass(option)]
    if isinstance(value, list) and options:
        for index, item in enumerate(value):
            _refuse_unknown_keys(item, options[0], f"{path}[{index}]")
        return
    if get_origin(expected) is dict and isinstance(value, dict) and options:
        for key, item in value.items():
            _refuse_unknown_keys(item, options[0], f"{path}.{key}")
            _convert(item, options[0], f"{path}.{key}")  # msgspec does not say which key of a mapping it means
        return
    if CostModel in get_args(expected):
        options = [LinearCost]
    kind = options[0] if options else expected
    if not (is_dataclass(kind) and isinstance(value, dict)):
        return
    hints = get_type_hints(kind)
    known = keys_of(kind)
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
            raise SpecError(f"{where}: unknown key; {hint}")
        _refuse_unknown_keys(item, hints[key], where)


def _custom(kind: type, value: object) -> object:
    """Decode a size, or a cost model; YAML has one form."""
    if kind is ByteSize:
        return ByteSize.parse(value)
    if kind is not CostModel:
        raise NotImplementedError(f"{kind} cannot be read")
    try:
        return msgspec.convert(value, LinearCost)
    except msgspec.ValidationError as error:
        raise ValueError(_readable(str(error))) from None  # msgspec adds the place


def _readable(message: str) -> str:
    """Put the path first: msgspec writes "Expected `int`, got `str` - at `$.pools[0].replicas`"."""
    text, _, place = message.partition(" - at `$")
    place, text = place.rstrip("`").lstrip("."), text.replace("`", "")
    text = re.sub(r"^Object missing required field (\w+)", r"\1 is missing", text)
    text = re.sub(r"\bobject\b", "mapping", re.sub(r"\barray\b", "list", text))
    return f"{place}: {text}" if place else text


def located(path: str, text: str, message: str) -> str:
    """Add file, line and pool to a message that begins with a key's path ("pools[0].engine: dtype is ...")."""
    root = yaml.compose(text)
    lines: dict[str, int] = {}
    _collect(root, "", lines)
    line = next((lines[place] for place in _places(message) if place in lines), None)
    where = path if line is None else f"{path}:{line}"
    named = _POOL.match(message)
    name = _pool_name(yaml.safe_load(text), int(named[1])) if named else ""
    return f"{where}: pool {name}: {message}" if name else f"{where}: {message}"


def _collect(node: Any, path: str, lines: dict[str, int]) -> None:
    """Find the line, from 1, of each key and entry below this node of a composed document."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}" if path else str(key.value)
            lines[below] = key.start_mark.line + 1
            _collect(value, below, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            below = f"{path}[{index}]"
            lines[below] = value.start_mark.line + 1
            _collect(value, below, lines)


def _places(message: str) -> list[str]:
    """Paths that the message may refer to, most specific first: its first word is a key, or a block before its key."""
    words = message.replace(":", " ").split()[:2]
    if not words:
        return []
    place, key = words[0], words[-1].rpartition(".")[2]
    found = [f"{place}.{key}"]
    while place:
        found.append(place)
        place = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", place)
    return found


def _pool_name(document: Any, index: int) -> str:
    try:
        name = document["pools"][index]["name"]
    except (TypeError, KeyError, IndexError):
        return ""
    return name if isinstance(name, str) else ""
