"""Two rings in one piece of shared memory, each with the number of messages that were ever written to it.

A reader waits for that number to move: asleep on a futex, or spinning (yielding its core each time, so that others may
run). Stores are seen in the order in which they were made, as on x86. Works within one host; nobody is told of a death.
"""

import asyncio
import ctypes
import mmap
import os
import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gang.ways import DEADLINE_S, IDLE_S, Compute, Start

SLOTS = 4  # messages that may stand unread
SLOT_BYTES = 64 << 10
RING_BYTES = 64 + SLOTS * SLOT_BYTES
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
FUTEX_WAIT, FUTEX_WAKE = 0, 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Ring:
    """One direction: one writer, one reader. The writer never has more than `SLOTS` messages unread."""

    def __init__(self, memory: mmap.mmap, start: int, spins: bool) -> None:
        self._memory = memory
        self._start = start
        self._written = ctypes.c_uint32.from_buffer(memory, start)
        self._read = 0
        self._spins = spins

    def put(self, data: bytes) -> None:
        if len(data) + 4 > SLOT_BYTES:
            raise ValueError(f"{len(data)} bytes do not fit a slot of {SLOT_BYTES}")
        number = self._written.value
        slot = self._slot(number)
        self._memory[slot : slot + 4 + len(data)] = len(data).to_bytes(4, "little") + data
        self._written.value = number + 1
        if not self._spins:
            _libc.syscall(FUTEX, ctypes.byref(self._written), FUTEX_WAKE, 1, None, None, 0)

    def get(self, timeout_s: float) -> bytes:
        """Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while self._written.value == self._read:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"nothing was written for {timeout_s:g} s")
            if self._spins:
                os.sched_yield()
            else:
                until = _Timespec(int(left_s), int(left_s % 1 * 1e9))
                _libc.syscall(FUTEX, ctypes.byref(self._written), FUTEX_WAIT, self._read, ctypes.byref(until), None, 0)
        slot = self._slot(self._read)
        self._read += 1
        num_bytes = int.from_bytes(self._memory[slot : slot + 4], "little")
        return self._memory[slot + 4 : slot + 4 + num_bytes]

    def _slot(self, number: int) -> int:
        return self._start + 64 + number % SLOTS * SLOT_BYTES


class Shared:
    def __init__(self, pid: int, out: Ring, back: Ring) -> None:
        self.pid = pid
        self._out = out
        self._back = back
        self._waiter = ThreadPoolExecutor(1)

    async def deliver(self, plan: bytes) -> bytes:
        self._out.put(plan)
        return await asyncio.get_running_loop().run_in_executor(self._waiter, self._back.get, DEADLINE_S)

    def close(self) -> None:
        self._waiter.shutdown(wait=False)


async def lead(way: str, start: Start) -> Shared:
    with tempfile.TemporaryDirectory(prefix="diptych-bench-", dir="/dev/shm") as folder:
        file = Path(folder) / "rings"
        file.write_bytes(bytes(2 * RING_BYTES))
        out, back = rings(file, way)
        pid = start(str(file))
        back.get(DEADLINE_S * 10)  # the rank has mapped it
    return Shared(pid, out, back)


def serve(way: str, address: str, compute: Compute) -> None:
    out, back = rings(Path(address), way)
    back.put(b"")
    while True:
        back.put(compute(out.get(IDLE_S)))


def rings(file: Path, way: str) -> tuple[Ring, Ring]:
    if not FUTEX:
        raise OSError(f"the number of the futex call on {platform.machine()} is not known here")
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), 2 * RING_BYTES)
    spins = way == "shm, spinning"
    return Ring(memory, 0, spins), Ring(memory, RING_BYTES, spins)
