"""Reads a whole file of slots and compares all digests. Changes nothing; needs no worker and no model."""

import fcntl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from io import BufferedReader
from pathlib import Path

from workers.errors import KVStoreError
from workers.kv_store.slab import FILE
from workers.kv_store.slot_format import (
    PAGE_BYTES,
    SlabTitle,
    decode_header,
    decode_title,
    is_header,
    is_intact,
    slot_bytes,
)

Progress = Callable[[str, int, int | None], None]
_EMPTY = bytes(PAGE_BYTES)


class SlotState(Enum):
    GOOD = "good"
    FREE = "free"
    TORN = "torn"  # no header was written completely: a worker ignores it
    FOREIGN = "foreign"  # of another model, layout or version than the last one: a worker ignores it
    CORRUPT = "corrupt"  # the block is not what its header says: a worker that reads it has a miss


@dataclass(frozen=True, slots=True)
class SlabReport:
    """How many slots of a file are in each state."""

    path: str
    block_bytes: int
    num_slots: int
    good: int
    free: int
    torn: int
    foreign: int
    corrupt: int


def find_slabs(path: Path) -> list[Path]:
    """The file itself, that of a worker's folder, or those of all workers' folders in it. Raises `KVStoreError`."""
    if path.is_file():
        return [path]
    found = [path / FILE] if (path / FILE).is_file() else sorted(path.glob(f"*/{FILE}"))
    if not found:
        raise KVStoreError(f"{path} has no {FILE}; give the path of cache.disk, a worker's folder there, or its file")
    return found


def verify_slab(path: Path, progress: Progress) -> SlabReport:
    """Read every slot. `progress` gets the path, and slots done and in all. Blocks.

    Raises `KVStoreError` for a file that a worker uses, or that is none; OSError if it cannot be read.
    """
    with _opened(path) as (file, title):
        size = slot_bytes(title.block_bytes)
        num_slots = (path.stat().st_size - PAGE_BYTES) // size
        buffer, states = bytearray(size), Counter[SlotState]()
        for slot in range(num_slots):
            if file.readinto(buffer) != size:
                raise KVStoreError(f"{path} became shorter while it was read")
            states[_state(memoryview(buffer), title)] += 1
            progress(str(path), slot + 1, num_slots)
    counts = {state.value: states[state] for state in SlotState}
    return SlabReport(str(path), title.block_bytes, num_slots, **counts)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, SlabTitle]]:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KVStoreError(f"{path} is in use by a worker; stop it first: its writes would look corrupt") from None
        page = file.read(PAGE_BYTES)
        title = decode_title(memoryview(page)) if len(page) == PAGE_BYTES else None
        if title is None:
            raise KVStoreError(f"{path} is no file of cached KV of this version; a worker that opens it makes it one")
        yield file, title


def _state(slot: memoryview, title: SlabTitle) -> SlotState:
    page = slot[:PAGE_BYTES]
    header = decode_header(page, title.fingerprint, title.block_bytes)
    if header is not None:
        block = slot[PAGE_BYTES : PAGE_BYTES + title.block_bytes]
        return SlotState.GOOD if is_intact(header, block) else SlotState.CORRUPT
    if page == _EMPTY:
        return SlotState.FREE
    return SlotState.FOREIGN if is_header(page) else SlotState.TORN
