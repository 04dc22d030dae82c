"""Reads public trace formats as rows of (time, prompt, output, prefix, session).

The format is recognized by columns and keys, not by the file's name:

    CSV         Azure LLM inference 2023 and 2024, Splitwise's simulator, Vidur (with or without times), BurstGPT
    JSON lines  Mooncake (ms, blocks of 512 tokens) and Qwen-Bailian (s, blocks of 16 tokens, chats)
    JSON        ShareGPT: texts, no times
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from cluster.offline.workload.arrivals import WorkloadError
from cluster.offline.workload.streams import first_character, json_array, json_lines, table

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16  # tokens

Kind = TypeVar("Kind")


class TraceRow(NamedTuple):
    """One request of a file. `at_s` is None if the file has no times. `place`: file and line, for errors."""

    place: str
    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A file being read. `rows` can be iterated once, while the file is open.

    `ticked`: times are rounded, so requests with the same time did not arrive at once. `drops_empty`: the format
    records failed requests as empty outputs. `note`: a note for the workload.
    """

    rows: Iterable[TraceRow]
    block_tokens: int = MOONCAKE_BLOCK
    ticked: bool = False
    drops_empty: bool = False
    note: str = ""


def four_characters(text: str) -> int:
    """An estimate of a text's tokens without a tokenizer."""
    return -(-len(text) // 4)


def read(stream: BufferedReader, path: Path) -> Trace:
    """The trace in an opened file."""
    match first_character(stream, path):
        case "[":
            return _objects(json_array(stream, path), path)
        case "{":
            return _objects(json_lines(stream, path), path)
    return _columns(table(stream, path), path)


def _utc_seconds(text: str) -> float:
    """`2023-11-16 18:15:46.6805900`, with or without an offset; UTC where there is none."""
    found = datetime.fromisoformat(text.strip())
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True)
class _Format:
    """The columns of a CSV format; names are case-insensitive."""

    name: str
    at: str
    prompt: str
    output: str
    at_s: Callable[[str], float] = float
    session: str = ""
    needs_times: bool = True
    drops_empty: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.at, self.prompt, self.output

    def missing(self, found: dict[str, int]) -> list[str]:
        wanted = self.columns if self.needs_times else self.columns[1:]
        return [name for name in wanted if name.casefold() not in found]


_FORMATS = (
    _Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _utc_seconds),
    _Format("Splitwise", "arrival_timestamp", "prompt_size", "token_size"),
    _Format("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", needs_times=False),
    _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", session="Session ID", drops_empty=True),
)


def _columns(rows: Iterator[tuple[int, list[str]]], path: Path) -> Trace:
    _, header = next(rows, (1, []))
    found = {name.strip().casefold(): column for column, name in enumerate(header)}
    form = min(_FORMATS, key=lambda each: (len(each.missing(found)), each.prompt.casefold() not in found))
    if missing := form.missing(found):
        known = "; ".join(f"{each.name}: {', '.join(each.columns)}" for each in _FORMATS)
        raise WorkloadError(
            f"{path}, line 1: no {' and no '.join(missing)} among the columns {_shortened(', '.join(header))}. "
            f"Known are {known}"
        )
    return Trace(_cells(rows, form, found, path), drops_empty=form.drops_empty)


def _cells(
    rows: Iterator[tuple[int, list[str]]], form: _Format, found: dict[str, int], path: Path
) -> Iterator[TraceRow]:
    at, prompt, output, session = (found.get(name.casefold(), -1) for name in (*form.columns, form.session))
    least = max(at, prompt, output) + 1
    line = f"{path}, line "
    for number, cells in rows:
        place = line + str(number)
        if len(cells) < least:
            raise WorkloadError(f"{place}: {len(cells)} columns where the first line has {len(found)}")
        try:
            at_s = None if at < 0 else form.at_s(cells[at])
            lengths = _whole(cells[prompt]), _whole(cells[output])
        except (ValueError, OverflowError):
            readers = zip(form.columns, (form.at_s, _whole, _whole), (at, prompt, output), strict=True)
            raise _misread(
                [(name, read, cells[column]) for name, read, column in readers if column >= 0], place
            ) from None
        yield TraceRow(place, at_s, *lengths, session=cells[session].strip() if 0 <= session < len(cells) else "")


def _whole(text: str) -> int:
    """A number of tokens, which some tools write as 12.0."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError from None
        return int(number)


def _misread(cells: Iterable[tuple[str, Callable[[str], float], str]], place: str) -> WorkloadError:
    """The error for the first of (column, reader, text) that cannot be read."""
    for column, read_cell, text in cells:
        try:
            read_cell(text)
        except (ValueError, OverflowError):
            what = "a time" if read_cell is _utc_seconds else "a number"
            return WorkloadError(f"{place}: {column} is {_shortened(repr(text))}, which is not {what}")
    raise AssertionError("all of them can be read")


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


class _BlockRequest(msgspec.Struct):
    """A request of Mooncake or Qwen-Bailian."""

    input_length: int
    output_length: int
    timestamp: float | None = None
    hash_ids: tuple[int, ...] = ()
    session_id: int | str | None = None
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    """A conversation of ShareGPT."""

    conversations: list[_Turn]
    id: int | str = ""


def _objects(records: Iterator[tuple[str, dict[str, Any]]], path: Path) -> Trace:
    first = next(records, None)
    if first is None:
        raise WorkloadError(f"{path} is empty")
    place, keys = first
    records = chain([first], records)
    if "conversations" in keys:
        note = "the first exchange of each conversation; a token counted for every 4 characters"
        return Trace(_conversations(records), drops_empty=True, note=note)
    if "input_length" in keys and "output_length" in keys:
        chats = "chat_id" in keys
        rows = _chats(records) if chats else _blocks(records)
        return Trace(rows, BAILIAN_BLOCK if chats else MOONCAKE_BLOCK, ticked=True)
    raise WorkloadError(
        f"{place}: no input_length and output_length (Mooncake, Qwen-Bailian) and no conversations (ShareGPT) among "
        f"the keys {_shortened(', '.join(keys))}"
    )


def _converted(record: dict[str, Any], kind: type[Kind], place: str) -> Kind:
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{place}: {error}") from error


def _blocks(records: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[TraceRow]:
    for place, record in records:
        found = _converted(record, _BlockRequest, place)
        at_s = None if found.timestamp is None else found.timestamp / 1000.0
        session = "" if found.session_id is None else str(found.session_id)
        yield TraceRow(place, at_s, found.input_length, found.output_length, found.hash_ids, session)


def _chats(records: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[TraceRow]:
    """A turn has the session of its parent turn; the first turn's parent is -1."""
    sessions: dict[int | str, str] = {}
    for place, record in records:
        found = _converted(record, _BlockRequest, place)
        chat, parent = found.chat_id, found.parent_chat_id
        if chat is None:
            raise WorkloadError(f"{place}: no chat_id")
        begins = parent is None or parent in (-1, "-1")
        session = str(chat) if begins or parent is None else sessions.get(parent, str(parent))
        sessions[chat] = session
        yield TraceRow(place, found.timestamp, found.input_length, found.output_length, found.hash_ids, session)


def _conversations(records: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[TraceRow]:
    """The first text is the prompt and the second the answer, as in vLLM's and SGLang's benchmarks."""
    for place, record in records:
        turns = _converted(record, _Conversation, place).conversations
        texts = [each.value.strip() for each in turns[:2]]
        prompt, output = (four_characters(text) if text else 0 for text in (*texts, "", "")[:2])
        yield TraceRow(place, None, prompt, output)
