"""The identity of this process, and what the kernel allows between processes.

Knows /proc, /sys and one system call; knows no backend.
"""

import ctypes
import os
from pathlib import Path

from kvtransfer.ticket import HostIdentity

INFINIBAND = Path("/sys/class/infiniband")
PF_EXITING = 0x4  # of a process's flags in /proc/PID/stat


def host_identity() -> HostIdentity:
    """Boot id, pid namespace and pid of this process; empty strings where the kernel doesn't provide them."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot_id, pid_namespace = "", ""
    return HostIdentity(boot_id=boot_id, pid_namespace=pid_namespace, pid=os.getpid())


class ProcessWatch:
    """A process of this pid namespace, and never a later one with its pid. Close it."""

    def __init__(self, pid: int) -> None:
        try:
            self._file: int | None = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except OSError:
            self._file = None

    def started(self) -> str:
        """When it began, in the kernel's ticks; "" once it ends, which is before its memory is freed."""
        if self._file is None:
            return ""
        try:
            state, *fields = os.pread(self._file, 1024, 0).decode(errors="replace").rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if state in "ZX" or int(fields[5]) & PF_EXITING else fields[18]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in INFINIBAND.iterdir())) if INFINIBAND.is_dir() else ()


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def check_process_memory(pid: int, address: int) -> None:
    """Read a byte of another process's memory by process_vm_readv, the system call under UCX's CMA.

    Raises `OSError`: EPERM when ptrace rules forbid it, ESRCH when the process is gone, EFAULT for a bad address.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        raise OSError(38, "process_vm_readv does not exist on this system")
    buffer = ctypes.create_string_buffer(1)
    local, remote = _IoVec(ctypes.addressof(buffer), 1), _IoVec(address, 1)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    got = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if got != 1:
        code = ctypes.get_errno() if got < 0 else 14
        raise OSError(code, f"process_vm_readv from process {pid}: {os.strerror(code)}")
