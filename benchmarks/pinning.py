"""CPU time of processes, core pinning, and pausing processes while others are measured."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence

import psutil

from cluster.offline.load.processes import Child, ProcessFailed


def family_cpu_s(child: Child) -> float:
    """CPU seconds of a child and its living descendants."""
    return sum(cpu_seconds(process) for process in child.family())


def cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0
    return float(times.user + times.system)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of one process, to the nanosecond. Raises `ProcessFailed` when it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3) on Linux
    except OSError as error:
        raise ProcessFailed(f"process {pid} has ended") from error


def pin(pids: Sequence[int], cores: Sequence[int]) -> None:
    """Bind every thread of these processes; threads started later inherit the binding."""
    for pid in pids:
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


@contextlib.contextmanager
def paused(pids: Sequence[int]) -> Iterator[None]:
    """Stop these processes (SIGSTOP) inside the block."""
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
