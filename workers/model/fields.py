"""Typed access to a JSON object in a model folder; errors name the file and the field.

Knows JSON; knows no model.
"""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from workers.errors import ModelError


class Fields:
    """The object in one JSON file. An absent or null field takes the default; without a default it is required."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self._content = content

    def get(self, name: str, default: Any = None) -> Any:
        value = self._content.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is present, even as null."""
        return name in self._content

    def count(self, name: str, default: int | None = None, most: int = 1 << 31, least: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "positive whole number" if least else "whole number, 0 or more"
            self.refuse(f"{name} is {value!r}; it must be a {kind}")
        if value > most:
            self.refuse(f"{name} is {value}; the largest possible value is {most}")
        return value

    def number(self, name: str, default: float | None = None, above: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.refuse(f"{name} is {value!r}; it must be a number")
        if above is not None and value <= above:
            self.refuse(f"{name} is {value}; it must be above {above:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{name} is {value!r}; it must be true or false")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.get(name, [])
        if not isinstance(value, list):
            self.refuse(f"{name} is {value!r}; it must be a list")
        return value

    def inner(self, name: str, **absent: Any) -> "Fields":
        """The object in a field; an empty one if absent. `absent` has defaults for its fields."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            self.refuse(f"{name} is {value!r}; it must be an object")
        return Fields(self.path, absent | value)

    def completed(self, **absent: Any) -> "Fields":
        """The same, with defaults for absent fields."""
        return Fields(self.path, absent | self._content)

    def replaced(self, **values: Any) -> "Fields":
        """The same, with other values."""
        return Fields(self.path, self._content | values)

    def only(self, name: str, *supported: Any) -> Any:
        """The field's value, which must be one of the supported ones; the first is the default."""
        value = self.get(name, supported[0])
        if value not in supported:
            known = ", ".join(str(each) for each in supported if each is not None) or "none"
            self.refuse(f"{name} {value!r} is not supported; supported: {known}")
        return value

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: {reason}")


def read_fields(path: Path) -> Fields:
    """The object in a JSON file. Raises `ModelError` if the file is missing or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: a model folder holds config.json, *.safetensors, tokenizer.json"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object")
    return Fields(path, content)
