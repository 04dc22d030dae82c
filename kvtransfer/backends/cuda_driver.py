"""CUDA's calls for sharing memory between processes, and copies on a stream of their own.

The driver's library, by ctypes: it alone can tell which allocation an address lies in, it has one name whatever CUDA
torch was built for, and its handles are plain bytes. Torch copies.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kvtransfer.backends.device_copies import bytes_at, copy_ranges
from kvtransfer.errors import TransportUnavailable
from kvtransfer.transport import Copies, Region

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaMapping:
    """A peer's allocation in this process, and its pool in it."""

    def __init__(self, address: int, pool: Tensor) -> None:
        self.address = address
        self.pool = pool


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
        self._ours = bytes_at(region.address, region.num_bytes, region.device)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def export(self) -> tuple[bytes, int]:
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(self._region.address))
        if base.value + size.value < self._region.address + self._region.num_bytes:
            raise TransportUnavailable("the pool lies in several allocations: unset torch's expandable_segments")
        try:
            self._call("cuIpcGetMemHandle", byref(handle), base)
        except TransportUnavailable as error:
            hint = "unset expandable_segments and backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"
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
                raise TransportUnavailable(f"the owner's pool lies outside its memory of {size.value} bytes")
            return CudaMapping(address.value, bytes_at(address.value + offset, num_bytes, str(self._device)))
        except BaseException as error:
            self._unmap(address.value)
            if isinstance(error, ValueError):
                raise TransportUnavailable(f"torch cannot copy from the owner's pool: {error}") from error
            raise

    def copy(self, mapping: CudaMapping, copies: Copies) -> None:
        with torch.cuda.stream(self._stream):
            try:
                copy_ranges(self._ours, mapping.pool, copies)
            finally:
                self._event.record(self._stream)
                self._event.synchronize()

    def unmap(self, mapping: CudaMapping) -> None:
        self._unmap(mapping.address)

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", c_int(self._device.index))

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
