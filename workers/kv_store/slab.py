"""A file of slots, allocated once: its size, its lock, and reads and writes of whole slots.

    page 0: a title, written and read back at open    slot 0: header page, block    slot 1 ...

Direct I/O where the file system has it, else buffered. Knows no block hash and no checksum.
"""

import errno
import fcntl
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from workers.errors import KVStoreError
from workers.kv_store.slot_format import PAGE_BYTES, slot_bytes

MAX_SLABS = 64  # of a path
SLAB_FILES = tuple([f"blocks-{number}.slab" for number in range(MAX_SLABS)])
SCAN_THREADS = 8
MEASURED_BYTES = 32 << 20
_ZEROS = memoryview(mmap.mmap(-1, PAGE_BYTES)).toreadonly()

T = TypeVar("T")


class SlabInUse(KVStoreError):
    """Another worker has the file open, or has just deleted it."""


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed memory that direct I/O takes: it begins with a memory page."""
    return memoryview(mmap.mmap(-1, num_bytes))


class Slab:
    """Owned by a KVStore, which closes it. Takes `slab_bytes` of the disk. Blocks; any thread may call it.

    Page 0 begins with `title`.

    Raises `KVStoreError` when the folder cannot be used, with what to do. Reads and writes raise `OSError`.
    """

    def __init__(self, path: Path, num_slots: int, block_bytes: int, title: bytes = b"") -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes(block_bytes)
        self.num_slots = num_slots
        self._folder = path.parent
        self._file = self._open()
        try:
            self._lock()
            self._allocate(slab_bytes(num_slots, block_bytes))
            self.is_direct = self._probe(title)
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            raise KVStoreError(f"{self._folder} is no folder; create it, or name another for the KV store") from None
        except OSError as error:
            raise KVStoreError(
                f"{self._folder} cannot be written ({error.strerror}); "
                "let this user write there, or name another folder for the KV store"
            ) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file closes
        except BlockingIOError:
            raise SlabInUse(f"{self.path} belongs to another worker") from None
        if not is_at(self._file, self.path):
            raise SlabInUse(f"{self.path} was deleted by another worker")

    def _allocate(self, num_bytes: int) -> None:
        """Give the file exactly this size. Checks the free space first: a failed allocation may fill the disk."""
        there, disk = os.fstat(self._file), os.fstatvfs(self._file)
        missing_bytes = num_bytes - min(there.st_blocks * 512, num_bytes)
        free_bytes = disk.f_bavail * disk.f_frsize
        try:
            if missing_bytes > free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._file, num_bytes)
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            os.ftruncate(self._file, min(there.st_size, num_bytes))
            raise KVStoreError(
                f"{self._folder} has no room for a KV store of {num_bytes / 2**30:.2f} GiB: "
                f"{free_bytes / 2**30:.2f} GiB are free ({error.strerror}); "
                "make the store smaller, or name a folder on another disk"
            ) from None

    def _probe(self, title: bytes) -> bool:
        """Write page 0 and read it back. Returns whether direct I/O works. Raises `KVStoreError`."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        page, back = aligned_buffer(PAGE_BYTES), aligned_buffer(PAGE_BYTES)
        page[:] = title + secrets.token_bytes(PAGE_BYTES - len(title))
        error: OSError | None = None
        for direct in (True, False):
            try:
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)
                if self._pwrite(page, 0) == self._pread(back, 0) == PAGE_BYTES and back == page:
                    return direct
            except OSError as failed:
                error = failed
        why = error.strerror if error else "other bytes came back"
        raise KVStoreError(
            f"a write to {self._folder} failed ({why}); check the disk, or name another folder for the KV store"
        )

    def read(self, slot: int, buffer: memoryview) -> None:
        """Read a slot into an aligned buffer of `slot_bytes`."""
        whole(self._pread(buffer, self.offset(slot)), buffer)

    def write(self, slot: int, buffer: memoryview) -> None:
        """Write a slot from an aligned buffer of `slot_bytes`."""
        whole(self._pwrite(buffer, self.offset(slot)), buffer)

    def erase(self, slot: int) -> None:
        """Zero a slot's header."""
        whole(self._pwrite(_ZEROS, self.offset(slot)), _ZEROS)

    def scan(self, parse: Callable[[memoryview], T | None]) -> list[tuple[int, T]]:
        """(slot, what `parse` makes of its header page), without None and without pages that cannot be read."""

        def part(slots: range) -> list[tuple[int, T]]:
            page, found = aligned_buffer(PAGE_BYTES), []
            for slot in slots:
                try:
                    whole(self._pread(page, self.offset(slot)), page)
                except OSError:
                    continue
                if (parsed := parse(page)) is not None:
                    found.append((slot, parsed))
            return found

        with ThreadPoolExecutor(SCAN_THREADS, "kv-store-scan") as threads:
            parts = threads.map(part, [range(first, self.num_slots, SCAN_THREADS) for first in range(SCAN_THREADS)])
            return [each for found in parts for each in found]

    def measure_reads(self, free: Sequence[int], threads: int) -> float:
        """Seconds per byte of reading with this many threads, at most `MEASURED_BYTES`; infinite if it fails.

        Writes to the last of these free slots first: what was never written is not read from the disk.
        """
        most = max(1, min(2 * threads, MEASURED_BYTES // self.slot_bytes))
        slots = free[-min(most, -(-len(free) // 2)) :] if free else range(min(most, self.num_slots))
        buffers = [aligned_buffer(self.slot_bytes) for _ in slots]
        try:
            for slot, buffer in zip(slots if free else (), buffers, strict=False):
                buffer[PAGE_BYTES:] = secrets.token_bytes(self.slot_bytes - PAGE_BYTES)
                self.write(slot, buffer)
            if not self.is_direct:
                os.fsync(self._file)
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
            begun_s = time.perf_counter()
            with ThreadPoolExecutor(threads, "kv-store-measure") as readers:
                list(readers.map(self.read, slots, buffers))
        except OSError:
            return math.inf
        return (time.perf_counter() - begun_s) / (len(slots) * self.slot_bytes)

    def close(self) -> None:
        """No read and no write may be in progress."""
        os.close(self._file)

    def offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def _pread(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._file, [buffer], offset)

    def _pwrite(self, buffer: memoryview, offset: int) -> int:
        return os.pwritev(self._file, [buffer], offset)


def whole(num_bytes: int, buffer: memoryview) -> None:
    """Raises `OSError` if a read or write of this many bytes was not that of the buffer."""
    if num_bytes != len(buffer):
        raise OSError(errno.EIO, f"{num_bytes} of {len(buffer)} bytes")


def is_at(file: int, path: Path) -> bool:
    """Whether this open file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def slab_bytes(num_slots: int, block_bytes: int) -> int:
    """The size of the file."""
    return PAGE_BYTES + num_slots * slot_bytes(block_bytes)


def open_slab(folder: Path, num_slots: int, block_bytes: int, title: bytes) -> Slab:
    """A slab that no worker has open: with this size and title, else with this size, else any, else a new one.

    So there are no more than workers that ran at the same time. Raises `KVStoreError`.
    """
    num_bytes = slab_bytes(num_slots, block_bytes)
    for path in sorted(map(folder.joinpath, SLAB_FILES), key=lambda each: _unlike(each, num_bytes, title)):
        try:
            return Slab(path, num_slots, block_bytes, title)
        except SlabInUse:
            continue
    raise KVStoreError(f"{folder} has {MAX_SLABS} slabs that workers use; give some of them another folder")


def _unlike(path: Path, num_bytes: int, title: bytes) -> int:
    """0: the file has this size and title; 3: there is none."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                return 2
            return 0 if file.read(len(title)) == title else 1
    except FileNotFoundError:
        return 3
    except OSError:
        return 2
