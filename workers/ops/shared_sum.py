"""Sums over ranks of one host through shared memory; `native/shared_sum.cpp` explains the algorithm.

Knows how ranks find the memory and detect a dead rank: each holds a lock on its own byte of the file, which the kernel
releases however the rank ends.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from workers.errors import RankLost
from workers.ops.native.library import kernel, library, pointer

PLACE_BYTES = 64  # the C++ source's `Place`
SLOT_BYTES = 256 << 10  # a larger sum takes several turns; the slots of a few ranks fit the caches
CHECK_S = 0.05  # between checks whether a late rank is still alive
_LOCK = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid


class SharedSum:
    """float32 on CPUs; overwrites x. The memory has no name, and lives as long as a rank maps it."""

    def __init__(self, file: int, rank: int, names: Sequence[str], timeout_s: float) -> None:
        """Owns the descriptor `file` of `file_bytes(len(names))` zeroed bytes."""
        self._file = file
        self._rank = rank
        self._names = names
        self._timeout_s = timeout_s
        self._turn = 0
        self._missing = ctypes.c_int64()
        self._memory = torch.frombuffer(mmap.mmap(file, file_bytes(len(names))), dtype=torch.uint8)
        self._kernel = kernel("shared_sum")
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, rank))

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.device.type == "cpu"
        x, each = x.contiguous(), SLOT_BYTES // 4
        for start in range(0, x.numel(), each):
            self._add(pointer(x) + 4 * start, min(each, x.numel() - start))
        return x

    def _add(self, address: int, count: int) -> None:
        self._turn += 1
        announce, begun = 1, time.monotonic()
        while True:
            self._kernel(
                pointer(self._memory), self._rank, len(self._names), SLOT_BYTES // 4, address, count, self._turn,
                announce, int(min(CHECK_S, self._timeout_s) * 1e6), ctypes.addressof(self._missing),
            )  # fmt: skip
            if self._missing.value < 0:
                return
            announce, missing = 0, self._missing.value
            if not self._is_alive(missing):
                raise RankLost(f"{self._names[missing]} is gone: it no longer holds its lock on the shared memory")
            if time.monotonic() - begun > self._timeout_s:
                raise RankLost(f"{self._names[missing]} did not answer within {self._timeout_s:g} s")

    def _is_alive(self, rank: int) -> bool:
        try:
            found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, rank))
        except (OSError, ValueError):
            raise RankLost(f"{self._names[self._rank]} has closed its shared sum") from None
        return bool(struct.unpack(_LOCK, found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """From any thread: ranks that wait for this one, and a thread that waits here, raise `RankLost`.

        The memory is freed with the object.
        """
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, self._rank))
            os.close(file)


def open_shared_sum(store: Store, rank: int, names: Sequence[str], timeout_s: float) -> SharedSum | None:
    """The sum over the ranks `names`, all of which call this; None on all of them if one cannot take part.

    Rank 0 creates memory, and all open it through /proc. Raises `RuntimeError` if a rank does not call within
    `timeout_s`.
    """

    def exchange(topic: str, value: str) -> list[str]:
        store.set(f"{topic}-{rank}", value)
        keys = [f"{topic}-{each}" for each in range(len(names))]
        store.wait(keys, timedelta(seconds=timeout_s))
        return [store.get(key).decode() for key in keys]

    usable = sys.platform == "linux" and library() is not None
    hosts = set(exchange("host", _host() if usable else ""))
    if len(hosts) > 1 or hosts == {""}:
        return None
    own = _make(file_bytes(len(names))) if rank == 0 else None
    shared: SharedSum | None = None
    try:
        made = exchange("file", "" if own is None else f"{_identity(own)} /proc/{os.getpid()}/fd/{own}")[0]
        if (file := _open(made)) is not None:
            shared = SharedSum(file, rank, names, timeout_s)
        if "no" not in exchange("open", "yes" if shared else "no"):
            return shared
    except BaseException:
        if shared is not None:
            shared.close()
        raise
    finally:
        if own is not None:
            os.close(own)
    if shared is not None:
        shared.close()
    return None


def file_bytes(ranks: int) -> int:
    return ranks * (PLACE_BYTES + 2 * SLOT_BYTES)


def _make(num_bytes: int) -> int | None:
    """A new file without a name, with all its memory reserved; None if there is no room."""
    file = os.memfd_create("diptych-sum")
    try:
        os.posix_fallocate(file, 0, num_bytes)  # otherwise a lack of memory would kill the process that writes
    except OSError:
        os.close(file)
        return None
    return file


def _identity(file: int) -> str:
    stat = os.fstat(file)
    return f"{stat.st_dev}:{stat.st_ino}"


def _open(made: str) -> int | None:
    """The file of rank 0; None where it cannot be opened, or where its process id means another process."""
    identity, _, path = made.partition(" ")
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if _identity(file) == identity:
        return file
    os.close(file)
    return None


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _lock(kind: int, rank: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, rank, 1, 0)
