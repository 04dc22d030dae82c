"""Memory that processes share, and an `IpcDriver` over it: the CUDA IPC backend without a GPU."""

import mmap
import os

import msgspec
import numpy as np

from kvtransfer.transport import Copies, Region

LEAD_BYTES = 3 * mmap.PAGESIZE + 64  # of an allocation before the pool


class SharedPages:
    """Zeroed memory in a file without a name."""

    def __init__(self, num_bytes: int) -> None:
        self.file = os.memfd_create("pool")
        os.ftruncate(self.file, LEAD_BYTES + num_bytes)
        self._map = mmap.mmap(self.file, LEAD_BYTES + num_bytes)
        self.address = _address_of(self._map) + LEAD_BYTES

    def __del__(self) -> None:
        os.close(self.file)


class PagesDriver:
    """`IpcDriver` for regions in `SharedPages`, between processes of one user."""

    device = "shared pages"

    def __init__(self, region: Region) -> None:
        assert isinstance(region.owner, SharedPages)
        self._file = region.owner.file
        self._ours = region.bytes()
        self.num_mapped = 0

    def export(self) -> tuple[bytes, int]:
        return msgspec.msgpack.encode((os.getpid(), self._file)), LEAD_BYTES

    def open(self, handle: bytes, offset: int, num_bytes: int) -> mmap.mmap:
        pid, number = msgspec.msgpack.decode(handle, type=tuple[int, int])
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            mapping = mmap.mmap(file, offset + num_bytes)
        finally:
            os.close(file)
        self.num_mapped += 1
        return mapping

    def copy(self, mapping: mmap.mmap, copies: Copies) -> None:
        with memoryview(mapping) as theirs:
            for start, to, length in copies.tolist():
                self._ours[to : to + length] = theirs[LEAD_BYTES + start : LEAD_BYTES + start + length]

    def unmap(self, mapping: mmap.mmap) -> None:
        mapping.close()
        self.num_mapped -= 1

    def close(self) -> None:
        assert not self.num_mapped


def _address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)
