"""A text that arrives in pieces. Its parsers are generators: they yield to wait for the next piece, and are written as
if the whole text were there. Knows no format.

What a parser consumes depends on the text only, not on the pieces. Every character is looked at a bounded number of
times, and only text that may be the beginning of a marker is kept.
"""

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Sink = Callable[[str], None]

SPACE = re.compile(r"\s*")
STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)  # the rest of a JSON string
STRUCTURE = re.compile(r'[^"{}\[\]]*(["{}\[\]]?)')
SCALAR = re.compile(r'[^\s,}\]"{\[]*')


class TextInput:
    """Owned by an `AnswerParser`, which appends pieces and resumes the format's parser after each."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._attempt: list[str] | None = None

    def append(self, piece: str) -> None:
        self._text = self._text[self._position :] + piece
        self._position = 0

    def end(self) -> None:
        """No further piece follows."""
        self._ended = True

    def attempt(self, begin: str) -> None:
        """Remember `begin` and what is read from now on, until `commit` or `fail`."""
        self._attempt = [begin]

    def commit(self) -> None:
        """What was read is what it seemed to be."""
        self._attempt = None

    def fail(self) -> str:
        """What was read since `attempt`; empty after `commit`."""
        parts, self._attempt = self._attempt or (), None
        return "".join(parts)

    def more(self) -> Wait[bool]:
        """Wait for a character. False: the text has ended."""
        while self._position == len(self._text) and not self._ended:
            yield
        return self._position < len(self._text)

    def peek(self) -> Wait[str]:
        """The next character, which stays; empty at the end."""
        return self._text[self._position] if (yield from self.more()) else ""

    def any(self) -> Wait[str]:
        """The next character; empty at the end."""
        return self._take(self._position + 1) if (yield from self.more()) else ""

    def run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """The longest run of certain characters; `pattern` is one character class, repeated."""
        parts = []
        while (yield from self.more()):
            found = pattern.match(self._text, self._position)
            parts.append(self._take(found.end() if found else self._position))
            if self._position < len(self._text):
                break
        return "".join(parts)

    def literal(self, *options: str) -> Wait[str]:
        """The first of these texts that comes next; empty: none does, and nothing was read."""
        while True:
            for option in options:
                if self._text.startswith(option, self._position):
                    return self._take(self._position + len(option))
            rest = self._text[self._position : self._position + max(map(len, options))]
            if self._ended or not any(option.startswith(rest) for option in options):
                return ""
            yield

    def until(self, markers: tuple[str, ...], sink: Sink) -> Wait[str]:
        """Give text to `sink` up to the first of these markers, and read it. Empty: the text has ended without one."""
        pattern, longest = _markers(markers)
        while True:
            if found := pattern.search(self._text, self._position):
                sink(self._take(found.start()))
                return self._take(found.end())
            end = len(self._text)
            if not self._ended:
                begin = max(self._position, end - longest + 1)
                starts = (at for at in range(begin, end) if any(m.startswith(self._text[at:]) for m in markers))
                end = next(starts, end)
            sink(self._take(end))
            if self._ended:
                return ""
            yield

    def rest(self, sink: Sink) -> Wait[None]:
        """Give all that is left to `sink`."""
        while (yield from self.more()):
            sink(self._take(len(self._text)))

    def json_value(self, sink: Sink) -> Wait[bool]:
        """Give a JSON value to `sink` as it comes, found by its quotes and brackets only. False: it is not complete."""
        first = yield from self.peek()
        if not first or first not in '"{[':
            scalar = yield from self.run(SCALAR)
            sink(scalar)
            return bool(scalar)
        depth, quoted = 0, False
        while (yield from self.more()):
            found = (STRING if quoted else STRUCTURE).match(self._text, self._position)
            assert found is not None, "both match the empty text"
            if found.end() == self._position:  # a backslash whose next character has not come
                if self._ended:
                    sink(self._take(len(self._text)))
                    return False
                yield
                continue
            sink(self._take(found.end()))
            match found[1]:
                case '"':
                    quoted = not quoted
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
            if found[1] and not depth and not quoted:
                return True
        return False

    def _take(self, end: int) -> str:
        piece, self._position = self._text[self._position : end], end
        if self._attempt is not None:
            self._attempt.append(piece)
        return piece


@cache
def _markers(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    return re.compile("|".join(map(re.escape, markers))), max(map(len, markers))
