"""What the owner of a slab publishes about it: a file beside the slab, which other workers read.

    page 0   a title: of whose blocks, how many slots, an id of this opening; and the number of the last change
    ring     the last `RING` changes
    table    the last change of each slot

    owner    table, ring, then the number; before a slot is written, and after
    reader   the number; then the ring from the last change it knows on, or the table if the ring has lost that one

A change is a record with a digest, and a torn one is ignored. The file is a hint: whoever reads a slot compares its
hash, fingerprint and digest. It is not mapped, because a mapped file that cannot be read ends the process.
"""

import os
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_digest

from workers.kv_store.slot_format import HASH_BYTES, NO_PREFIX, PAGE_BYTES

RING = 4096
_MAGIC = b"diptyidx"
_FORMAT = 1
_TITLE = struct.Struct("<8sI32sQ8s")  # magic, format, fingerprint, number of slots, id of this opening
_NUMBER = struct.Struct("<Q")
_CHANGE = struct.Struct("<QQ16sQ")  # number, twice the slot and 1 if it has a block, block hash, prefix
_DIGEST_BYTES = 8
_TITLE_BYTES = _TITLE.size + _DIGEST_BYTES
RECORD_BYTES = _CHANGE.size + _DIGEST_BYTES
_TABLE = PAGE_BYTES + RING * RECORD_BYTES  # where it begins


class SlotContent(NamedTuple):
    """`block_hash` is None: no block that can be read. `prefix` as in a slot's header."""

    slot: int
    block_hash: bytes | None = None
    prefix: int | None = None


class SlotChange(NamedTuple):
    """`old`: the block hash before."""

    content: SlotContent
    old: bytes | None


def index_path(slab: Path) -> Path:
    return slab.with_suffix(".index")


def index_bytes(num_slots: int) -> int:
    """The size of the file."""
    return _TABLE + num_slots * RECORD_BYTES


class SharedIndex:
    """Owned by the slab's owner, who closes it. Raises `OSError`. The writing threads call `change`."""

    def __init__(self, path: Path, fingerprint: bytes, num_slots: int, found: Iterable[SlotContent]) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            data = bytearray(index_bytes(num_slots))
            for content in found:
                _put(data, _TABLE + content.slot * RECORD_BYTES, _record(0, content))
            _put(data, 0, _sealed(_TITLE.pack(_MAGIC, _FORMAT, fingerprint, num_slots, secrets.token_bytes(8))))
            os.ftruncate(self._file, len(data))
            os.posix_fallocate(self._file, 0, len(data))
            self._write(memoryview(data)[PAGE_BYTES:], PAGE_BYTES)
            self._write(memoryview(data)[:PAGE_BYTES], 0)  # readers take the table once they see a new title
        except BaseException:
            self.close()
            raise

    def change(self, content: SlotContent) -> None:
        """Publish what a slot holds from now on."""
        with self._lock:
            record = _record(self._number + 1, content)
            self._write(record, _TABLE + content.slot * RECORD_BYTES)
            self._write(record, PAGE_BYTES + self._number % RING * RECORD_BYTES)
            self._number += 1
            self._write(_NUMBER.pack(self._number), _TITLE_BYTES)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        os.close(self._file)


class SharedIndexReader:
    """Reads the file of another owner of this fingerprint. Closed by whoever opened it. Blocks; raises `OSError`."""

    def __init__(self, path: Path, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._title = b""
        self._number = 0
        self._block_hashes: dict[int, bytes] = {}  # by slot
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def changes(self) -> list[SlotChange]:
        """What changed since the last call; at the first one, all there is."""
        page = os.pread(self._file, _TITLE_BYTES + _NUMBER.size, 0)
        title, last = page[:_TITLE_BYTES], page[_TITLE_BYTES:]
        if len(last) < _NUMBER.size or not _is_whole(title):
            return []  # an owner is writing it, or it is none
        (number,) = _NUMBER.unpack(last)
        magic, form, fingerprint, num_slots, _ = _TITLE.unpack(title[: _TITLE.size])
        if (magic, form, fingerprint) != (_MAGIC, _FORMAT, self._fingerprint):
            return list(self._changed(SlotContent(slot) for slot in list(self._block_hashes)))
        contents = self._newer(number) if title == self._title else None
        if contents is None:
            contents = self._table(num_slots)
        self._title, self._number = title, number
        return list(self._changed(contents))

    def _newer(self, number: int) -> list[SlotContent] | None:
        """Up to this change. None: the ring has lost some."""
        if not 0 <= number - self._number <= RING:
            return None
        contents = []
        for each in range(self._number, number):
            offset = PAGE_BYTES + each % RING * RECORD_BYTES
            found = _decode(os.pread(self._file, RECORD_BYTES, offset))
            if found is None or found[0] != each + 1:
                return None
            contents.append(found[1])
        return contents

    def _table(self, num_slots: int) -> list[SlotContent]:
        num_slots = min(num_slots, (os.fstat(self._file).st_size - _TABLE) // RECORD_BYTES)
        data = memoryview(os.pread(self._file, max(0, num_slots) * RECORD_BYTES, _TABLE))
        records = (data[start : start + RECORD_BYTES] for start in range(0, len(data), RECORD_BYTES))
        there = {found[1].slot: found[1] for record in records if (found := _decode(record)) is not None}
        return [*there.values(), *(SlotContent(slot) for slot in self._block_hashes if slot not in there)]

    def _changed(self, contents: Iterable[SlotContent]) -> Iterator[SlotChange]:
        for content in contents:
            old = self._block_hashes.pop(content.slot, None)
            if content.block_hash is not None:
                self._block_hashes[content.slot] = content.block_hash
            if old != content.block_hash:
                yield SlotChange(content, old)

    def close(self) -> None:
        os.close(self._file)


def _put(data: bytearray, offset: int, part: bytes) -> None:
    data[offset : offset + len(part)] = part


def _sealed(fields: bytes) -> bytes:
    return fields + xxh3_64_digest(fields)


def _is_whole(record: bytes | memoryview) -> bool:
    return xxh3_64_digest(record[:-_DIGEST_BYTES]) == record[-_DIGEST_BYTES:]


def _record(number: int, content: SlotContent) -> bytes:
    block_hash = content.block_hash if content.block_hash is not None else bytes(HASH_BYTES)
    prefix = content.prefix if content.prefix is not None else NO_PREFIX
    return _sealed(_CHANGE.pack(number, 2 * content.slot + (content.block_hash is not None), block_hash, prefix))


def _decode(record: bytes | memoryview) -> tuple[int, SlotContent] | None:
    """The number of a change and its content. None: it was not written completely, or never."""
    if len(record) != RECORD_BYTES or not _is_whole(record):
        return None
    number, place, block_hash, prefix = _CHANGE.unpack(record[: _CHANGE.size])
    return number, SlotContent(place >> 1, block_hash if place & 1 else None, prefix if prefix != NO_PREFIX else None)
