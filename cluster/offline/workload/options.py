"""The options in a workload's description: which there are, what they may be, and how they are read from text.

Knows no file and no process. A wrong option is one `WorkloadError` that names the nearest right one.
"""

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.offline.workload.arrivals import MOST_REQUESTS, MOST_TOKENS, WorkloadError


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What a description says; None: it says nothing. `load_workload` has what each means."""

    rate: float | None = None
    count: int | None = None
    duration: float | None = None
    lengths: str | None = None
    cv: float | None = None
    shape: float | None = None
    on: float | None = None
    off: float | None = None
    swing: float | None = None
    period: float | None = None
    begin: float | None = None  # written "from"
    until: float | None = None
    first: int | None = None
    clip: int | None = None
    drop: int | None = None
    speed: float | None = None
    sample: int | None = None
    arrivals: str | None = None
    jitter: str | float | None = None
    block: int | None = None
    sort: str | None = None
    zero: str | None = None


@dataclass(frozen=True, slots=True)
class _Option:
    """`read` raises ValueError for what breaks the rule."""

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


def _word(*words: str) -> _Option:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return _Option(f"one of {', '.join(words)}", read)


def _jitter() -> _Option:
    words, number = _word("auto", "on", "off"), _number(1e-6, 1e6)

    def read(text: str) -> str | float | int:
        try:
            return words.read(text)
        except ValueError:
            return number.read(text)

    return _Option("auto, on, off, or the tick's seconds", read)


_SECONDS = _number(1e-6, 1e9)
_OPTIONS = {
    "rate": _number(1e-6, 1e6),
    "count": _count(MOST_REQUESTS),
    "duration": _SECONDS,
    "lengths": _Option("a mix, PROMPT/OUTPUT or a trace", str),
    "cv": _number(0.01, 100.0),
    "shape": _number(0.1, 100.0),
    "on": _SECONDS,
    "off": _SECONDS,
    "swing": _number(0.0, 1.0),
    "period": _SECONDS,
    "from": _number(0.0, 1e9),
    "until": _SECONDS,
    "first": _count(MOST_REQUESTS),
    "clip": _count(2 * MOST_TOKENS),
    "drop": _count(2 * MOST_TOKENS),
    "speed": _number(1e-6, 1e6),
    "sample": _count(MOST_REQUESTS),
    "arrivals": _word("scaled", "poisson", "constant", "burst"),
    "jitter": _jitter(),
    "block": _count(MOST_TOKENS),
    "sort": _word("yes", "no"),
    "zero": _word("refuse", "drop"),
}
_COMMON = ("from", "until", "first", "clip", "drop", "speed")
FOR_TRACES = ("rate", "sample", "arrivals", "jitter", "block", "sort", "zero", *_COMMON)
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
    """Of a source that knows only these keys."""
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
