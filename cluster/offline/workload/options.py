"""The options of a workload description: their names, valid values and parser.

The `WorkloadError` for an unknown option suggests the nearest one.
"""

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cluster.offline.workload.arrivals import MAX_REQUESTS, MAX_TOKENS, WorkloadError


@dataclass(frozen=True, slots=True)
class _Option:
    """`read` raises ValueError for invalid text; `rule` says what is valid."""

    rule: str
    read: Callable[[str], str | float | int]


def _number(least: float, most: float) -> _Option:
    def read(text: str) -> float:
        if not least <= (found := float(text)) <= most:
            raise ValueError
        return found

    return _Option(f"a number from {least:g} to {most:g}", read)


def _count(most: int) -> _Option:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or not 1 <= int(text) <= most:
            raise ValueError
        return int(text)

    return _Option(f"a whole number from 1 to {most:,}", read)


def _jitter() -> _Option:
    number = _number(1e-6, 1e6)

    def read(text: str) -> str | float | int:
        return text if text in ("auto", "on", "off") else number.read(text)

    return _Option("auto, on, off, or the tick's seconds", read)


def _field(option: _Option) -> Any:
    return field(default=None, metadata={"option": option})


_SECONDS = _number(1e-6, 1e9)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The options of a description; None: not given. `load_workload` documents them."""

    rate: float | None = _field(_number(1e-6, 1e6))
    count: int | None = _field(_count(MAX_REQUESTS))
    duration: float | None = _field(_SECONDS)
    lengths: str | None = _field(_Option("a mix, PROMPT/OUTPUT or a trace", str))
    cv: float | None = _field(_number(0.01, 100.0))
    shape: float | None = _field(_number(0.1, 100.0))
    on: float | None = _field(_SECONDS)
    off: float | None = _field(_SECONDS)
    swing: float | None = _field(_number(0.0, 1.0))
    period: float | None = _field(_SECONDS)
    begin: float | None = _field(_number(0.0, 1e9))  # written "from"
    until: float | None = _field(_SECONDS)
    first: int | None = _field(_count(MAX_REQUESTS))
    clip: int | None = _field(_count(2 * MAX_TOKENS))
    speed: float | None = _field(_number(1e-6, 1e6))
    jitter: str | float | None = _field(_jitter())


_OPTIONS: dict[str, _Option] = {
    "from" if each.name == "begin" else each.name: each.metadata["option"] for each in fields(WorkloadOptions)
}
_COMMON = ("from", "until", "first", "clip", "speed")
FOR_TRACES = ("rate", "jitter", *_COMMON)
FOR_ALL_PROCESSES = ("rate", "count", "duration", "lengths", *_COMMON)


def split(text: str) -> tuple[str, str]:
    """The source and its options: `poisson:rate=4` is `poisson` and `rate=4`. An existing file's name is all source."""
    if os.path.exists(text):
        return text, ""
    head, _, rest = text.partition(":")
    if found := re.match(r"(.*?):(\s*\w+\s*=.*)", text, re.DOTALL):
        head, rest = found.groups()
    return head.strip(), rest.strip()


def parse_options(text: str, known: Sequence[str], source: str) -> WorkloadOptions:
    """Parse `KEY=VALUE,...` for a source that takes the `known` keys."""
    values: dict[str, str | float | int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, written = (each.strip() for each in part.partition("="))
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise WorkloadError(f"{source} has no option {key!r}; {hint}")
        if key in values:
            raise WorkloadError(f"{source}: {key} is written twice")
        option = _OPTIONS[key]
        try:
            values[key] = option.read(written)
        except ValueError:
            given = f"is {written!r}" if equals else "has no value"
            raise WorkloadError(f"{source}: {key} {given}; it must be {option.rule}") from None
    if "from" in values:
        values["begin"] = values.pop("from")
    return WorkloadOptions(**values)  # type: ignore[arg-type]  # each reader gives its field's type
