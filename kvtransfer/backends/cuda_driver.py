"""CUDA's calls for sharing memory between processes, and copies on a stream of their own.

The driver's library, by ctypes: only it can tell which allocation an address belongs to, it has one name for all CUDA
versions of torch, and its handles are plain bytes. Torch has the streams and events.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtransfer.backends.device_copies import copy_ranges
from kvtransfer.errors import TransportUnavailable
from kvtransfer.transport import Copies, Region

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1
FEW_RANGES = 8  # copied one by one; a launch for all of them takes as long
LARGE_BYTES = 8 << 20  # of a range that is copied alone: that takes longer than its launch


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class CudaMapping:
    """The addresses of a peer's allocation, and of its pool in it, in this process."""

    address: int
    pool: int


class CudaDriver:
    """`IpcDriver` of one GPU. Raises `TransportUnavailable`."""

    def __init__(self, region: Region) -> None:
        device = self._device = torch.device(region.device)
        self._region = region
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportUnavailable(f"CUDA's driver does not load: {error}") from error
        self.device = str(torch.cuda.get_device_properties(device).uuid)
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(self._device.index))
        self._call("cuCtxSetCurrent", context)  # of this thread; the context is torch's, too
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        scratch = torch.zeros(64, dtype=torch.uint8, device=device)
        self._copy(scratch.data_ptr(), scratch.data_ptr(), np.array([[0, 0, 16]] * (FEW_RANGES + 1)))  # compiles

    def export(self) -> tuple[bytes, int]:
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(self._region.address))
        if base.value + size.value < self._region.address + self._region.num_bytes:
            raise TransportUnavailable("the pool is in several allocations: unset torch's expandable_segments")
        try:
            self._call("cuIpcGetMemHandle", byref(handle), base)
        except TransportUnavailable as error:
            hint = "torch's expandable_segments and cudaMallocAsync make such memory: see PYTORCH_ALLOC_CONF"
            raise TransportUnavailable(f"the pool's memory cannot be shared: {error}; {hint}") from error
        return bytes(handle), self._region.address - base.value

    def open(self, handle: bytes, offset: int, num_bytes: int) -> CudaMapping:
        if len(handle) != HANDLE_BYTES:
            raise TransportUnavailable(f"a CUDA memory handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address, base, size = c_uint64(), c_uint64(), c_size_t()
        packed = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), packed, c_uint(LAZY_ENABLE_PEER_ACCESS))
        try:
            self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            if offset < 0 or address.value + offset + num_bytes > base.value + size.value:
                raise TransportUnavailable(f"the owner's pool is outside its memory of {size.value} bytes")
        except BaseException:
            self._unmap(address.value)
            raise
        return CudaMapping(address.value, address.value + offset)

    def copy(self, mapping: CudaMapping, copies: Copies) -> None:
        self._copy(self._region.address, mapping.pool, copies)

    def unmap(self, mapping: CudaMapping) -> None:
        self._unmap(mapping.address)

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", c_int(self._device.index))

    def _copy(self, target: int, source: int, copies: Copies) -> None:
        """Waits by spinning: a copy takes less than a millisecond, and a thread that sleeps wakes up late."""
        with torch.cuda.stream(self._stream):
            try:
                alone, rest = _divided(copies)
                stream = c_void_p(self._stream.cuda_stream)
                for start, to, length in alone.tolist():
                    self._call(
                        "cuMemcpyAsync", c_uint64(target + to), c_uint64(source + start), c_size_t(length), stream
                    )
                if len(rest):
                    table = torch.empty(rest.shape, dtype=torch.int64, pin_memory=True)
                    table.numpy()[:] = rest
                    copy_ranges(target, source, rest, table.to(self._device, non_blocking=True))
            finally:
                self._event.record(self._stream)
                self._event.synchronize()

    def _unmap(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        """Raises `TransportUnavailable` with the driver's words."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            words = text.value.decode() if text.value else "unknown error"
            raise TransportUnavailable(f"{name} failed: {words} ({code})")


def _divided(copies: Copies) -> tuple[Copies, Copies]:
    """Those to be copied one by one, and those for one launch."""
    if len(copies) <= FEW_RANGES:
        return copies, copies[:0]
    large = copies[:, 2] >= LARGE_BYTES
    return (copies[large], copies[~large]) if large.any() else (copies[:0], copies)
