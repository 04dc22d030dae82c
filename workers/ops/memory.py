"""Host memory on huge pages: a pass over weights or KV is up to a third faster with fewer TLB misses."""

import contextlib
import mmap
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # mapped at once; untouched pages cost nothing
ALIGNMENT = 64  # a cache line


class HugePages:
    """Allocates zeroed bytes, several tensors per mapping. A mapping is freed with its last tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to a cache line."""
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                self._chunk, self._used = _map(max(num_bytes, CHUNK_BYTES)), 0
            start = self._used
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return self._chunk[start : start + num_bytes]


def pinned(num_bytes: int) -> Tensor:
    """Zeroed host memory [byte] that a GPU reads and writes itself. Unpinned with its last tensor.

    torch's own pinned memory is rounded up to a power of two, up to twice of what a large cache is meant to take.
    Raises `RuntimeError` if it cannot be pinned.
    """
    mapping = _mapping(num_bytes)
    view = memoryview(mapping)
    memory = torch.frombuffer(view, dtype=torch.uint8)
    address = memory.data_ptr()
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cuda.cudaHostRegister(address, num_bytes, 0))

    def unpin(_: mmap.mmap) -> None:
        cuda.cudaHostUnregister(address)

    # Of the view, and with the mapping: a mapping is unmapped before a finalizer of its own is called.
    weakref.finalize(view, unpin, mapping).atexit = False
    return memory


def _map(num_bytes: int) -> Tensor:
    with torch.inference_mode(False):  # or nothing could write to it outside inference mode
        return torch.frombuffer(_mapping(num_bytes), dtype=torch.uint8)


def _mapping(num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


PAGES = HugePages()  # one allocator per process
