"""Memory on huge pages: a pass over weights or KV is up to a third faster with fewer TLB misses."""

import contextlib
import mmap
import threading

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


def _map(num_bytes: int) -> Tensor:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


PAGES = HugePages()  # one allocator per process
