"""Reads a whole slab and compares all digests. Changes nothing and locks nothing; needs no worker and no model."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path

from workers.errors import KVStoreError
from workers.kv_store.slab import SLAB_FILES
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
AGAIN_S = 1.0  # until a slot that looks damaged is read again: a worker may be writing it
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
    """The file itself, or those in the folder. Raises `KVStoreError`."""
    found = [path] if path.is_file() else [each for each in map(path.joinpath, SLAB_FILES) if each.is_file()]
    if not found:
        raise KVStoreError(f"{path} has no {SLAB_FILES[0]}; give the path of cache.disk, or a file there")
    return found


def verify_slab(path: Path, progress: Progress) -> SlabReport:
    """Read every slot. `progress` gets the path, and slots done and in all. Blocks.

    A worker may use the file: then each slot is as it was at some time. Raises `KVStoreError` for a file that is no
    slab; OSError if it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        title = _title(path, file)
        size = slot_bytes(title.block_bytes)
        num_slots = (path.stat().st_size - PAGE_BYTES) // size
        buffer = memoryview(bytearray(size))

        def state(slot: int) -> SlotState:
            file.seek(PAGE_BYTES + slot * size)
            if file.readinto(buffer) != size:
                raise KVStoreError(f"{path} became shorter while it was read")
            return _state(buffer, title)

        states = []
        for slot in range(num_slots):
            states.append(state(slot))
            progress(str(path), slot + 1, num_slots)
        damaged = [slot for slot, found in enumerate(states) if found in (SlotState.TORN, SlotState.CORRUPT)]
        if damaged:
            time.sleep(AGAIN_S)
        for slot in damaged:
            states[slot] = state(slot)
    counts = Counter(states)
    return SlabReport(str(path), title.block_bytes, num_slots, **{each.value: counts[each] for each in SlotState})


def _title(path: Path, file: FileIO) -> SlabTitle:
    page = file.read(PAGE_BYTES)
    title = decode_title(memoryview(page)) if len(page) == PAGE_BYTES else None
    if title is None:
        raise KVStoreError(f"{path} is no file of cached KV of this version; a worker that takes it makes it one")
    return title


def _state(slot: memoryview, title: SlabTitle) -> SlotState:
    page = slot[:PAGE_BYTES]
    header = decode_header(page, title.fingerprint, title.block_bytes)
    if header is not None:
        block = slot[PAGE_BYTES : PAGE_BYTES + title.block_bytes]
        return SlotState.GOOD if is_intact(header, block) else SlotState.CORRUPT
    if page == _EMPTY:
        return SlotState.FREE
    return SlotState.FOREIGN if is_header(page) else SlotState.TORN
