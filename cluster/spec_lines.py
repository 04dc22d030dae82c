"""Where in a cluster file something stands: its line, and the pool that it belongs to. Knows YAML; knows no key."""

import re
from typing import Any

_FILE = re.compile(r"pools\[(\d+)\]")


def located(path: str, text: str, message: str) -> str:
    """A message that begins with the place of a key ("pools[0].engine: dtype is ..."), with file, line and pool."""
    import yaml

    root = yaml.compose(text)
    lines: dict[str, int] = {}
    _collect(root, "", lines)
    line = next((lines[place] for place in _places(message) if place in lines), None)
    where = path if line is None else f"{path}:{line}"
    named = _FILE.match(message)
    name = _pool_name(yaml.safe_load(text), int(named[1])) if named else ""
    return f"{where}: pool {name}: {message}" if name else f"{where}: {message}"


def _collect(node: Any, path: str, lines: dict[str, int]) -> None:
    """The line, from 1, of each key and each entry below this node of a composed document."""
    import yaml

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
    """What the message may speak of, nearest first: its first word names a key, or a block whose key comes next."""
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
