"""Streams a trace file: plain or gzip, lines or JSON records, never the whole file at once.

Knows no trace format. Errors are `WorkloadError`s that name the file and, if known, the line.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, cast

import msgspec

from cluster.offline.workload.arrivals import WorkloadError

MAX_LINE_BYTES = 64 << 20
_PIECE = 1 << 20
_BOM = b"\xef\xbb\xbf"
_BETWEEN = re.compile(r"[\s,]*")  # objects of an array


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The file's bytes; gzip is found by content. Errors of file, compression and encoding become `WorkloadError`."""
    try:
        with path.open("rb") as raw:
            if raw.peek(2).startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield BufferedReader(cast(Any, unpacked), _PIECE)
            else:
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise WorkloadError(f"{path}: damaged gzip ({error}); copy it again") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8 text; a trace is CSV, JSON lines or JSON") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error


def first_character(stream: BufferedReader, path: Path) -> str:
    """The first character after white space. Consumes nothing."""
    seen = stream.peek(1)
    if not seen:
        raise WorkloadError(f"{path} is empty")
    if b"\0" in seen:
        raise WorkloadError(f"{path}: a binary file; a trace is CSV, JSON lines or JSON, plain or gzip")
    return seen.removeprefix(_BOM).lstrip()[:1].decode("utf-8", "replace")


def lines(stream: BufferedReader, path: Path) -> Iterator[str]:
    """Every line, including blank ones, so that counting them gives line numbers."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES:
            raise WorkloadError(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; this is no trace")
        yield (line.removeprefix(_BOM) if number == 1 else line).decode("utf-8")


def table(stream: BufferedReader, path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV with their line numbers; blank lines left out."""
    reader = csv.reader(lines(stream, path))
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise WorkloadError(f"{path}, line {reader.line_num}: {error}") from error


def json_lines(stream: BufferedReader, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """One object per line, with its file and line."""
    for number, line in enumerate(lines(stream, path), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WorkloadError(f"{place}: not one JSON object a line ({error})") from error
        yield place, _object(found, place)


def json_array(stream: BufferedReader, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of one large array, with file and record number; holds a piece of the file and one object."""
    text = TextIOWrapper(stream, "utf-8-sig")
    decoder = json.JSONDecoder()
    held, piece, number = text.read(_PIECE), _PIECE, 0
    at = _skip_separators(held, held.index("[") + 1)
    while held[at : at + 1] != "]":
        place = f"{path}, record {number + 1}"
        try:
            found, at = decoder.raw_decode(held, at)
        except (ValueError, RecursionError) as error:
            more = text.read(piece)
            if not more or len(held) - at > MAX_LINE_BYTES:
                raise WorkloadError(f"{place}: not JSON, or cut off ({error})") from error
            held, at, piece = (
                held[at:] + more,
                0,
                2 * piece,
            )  # do not decode a long object for every piece
        else:
            piece, number = _PIECE, number + 1
            yield place, _object(found, place)
        at = _skip_separators(held, at)


def _skip_separators(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def _object(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise WorkloadError(f"{place}: a {type(found).__name__} where an object with the request's lengths must be")
    return found
