"""Small stores for tests, on a file whose reads and writes can fail."""

import threading
from collections.abc import Callable
from pathlib import Path

from workers.kv_store.kv_store import KVStore
from workers.kv_store.slab import SLAB_FILES, Slab
from workers.kv_store.slot_format import PAGE_BYTES, encode_title, slot_bytes

BLOCK_BYTES = 5000  # not a whole number of pages
SLOT_BYTES = slot_bytes(BLOCK_BYTES)
FINGERPRINT = bytes(range(32))
FILE = SLAB_FILES[0]
WAIT_S = 30.0  # for what takes milliseconds


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def block_of(number: int) -> bytes:
    """Content that only this block has."""
    return b"".join((number * 1000 + place).to_bytes(8, "little") for place in range(BLOCK_BYTES // 8))


def file_bytes(num_slots: int) -> int:
    return PAGE_BYTES + num_slots * SLOT_BYTES


class FaultySlab(Slab):
    """`on_read` and `on_write` replace the system calls once the slab is open; they may call `really`."""

    def __init__(self, folder: Path, num_slots: int, fingerprint: bytes = FINGERPRINT, file: str = FILE) -> None:
        self.on_read: Callable[[memoryview, int], int] | None = None
        self.on_write: Callable[[memoryview, int], int] | None = None
        super().__init__(folder / file, num_slots, BLOCK_BYTES, encode_title(fingerprint, BLOCK_BYTES))

    def _pread(self, buffer: memoryview, offset: int) -> int:
        return self.on_read(buffer, offset) if self.on_read else super()._pread(buffer, offset)

    def _pwrite(self, buffer: memoryview, offset: int) -> int:
        return self.on_write(buffer, offset) if self.on_write else super()._pwrite(buffer, offset)

    def really_read(self, buffer: memoryview, offset: int) -> int:
        return super()._pread(buffer, offset)

    def really_write(self, buffer: memoryview, offset: int) -> int:
        return super()._pwrite(buffer, offset)


class Hang:
    """An I/O that does not return until `release`. `begun` is set by the first one."""

    def __init__(self, then: Callable[[memoryview, int], int]) -> None:
        self.begun, self._released, self._then = threading.Event(), threading.Event(), then

    def __call__(self, buffer: memoryview, offset: int) -> int:
        self.begun.set()
        assert self._released.wait(WAIT_S)
        return self._then(buffer, offset)

    def release(self) -> None:
        self._released.set()


class Opened:
    """A store, its slab, and what it said was found and is gone."""

    def __init__(self, folder: Path, num_slots: int = 4, fingerprint: bytes = FINGERPRINT, file: str = FILE) -> None:
        self.gone: list[bytes] = []
        self.found: dict[bytes, int] = {}
        self.slab = FaultySlab(folder, num_slots, fingerprint, file)
        self.store = KVStore(self.slab, fingerprint)
        self.store.watch(self.found.__setitem__, self.gone.append)

    async def put(self, *numbers: int) -> list[bool]:
        return [await self.store.write(hash_of(number), memoryview(block_of(number))) for number in numbers]

    async def get(self, number: int, timeout_s: float = WAIT_S) -> bytes | None:
        """The block, or None for a miss. A miss must leave the target as it was."""
        target = bytearray(BLOCK_BYTES)
        if await self.store.read(hash_of(number), memoryview(target), timeout_s):
            return bytes(target)
        assert target == bytes(BLOCK_BYTES)
        return None

    async def close(self) -> None:
        self.store.check()
        await self.store.close()
