"""The machine and the versions of a measurement."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("diptych", "torch", "ray", "grpcio", "numpy", "nixl-cu12", "nixl-cu13", "xxhash", "transformers")


def cpu_name() -> str:
    """The processor's name in /proc/cpuinfo, else Python's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def system_name() -> str:
    return f"{platform.system()} {platform.release()}, {platform.machine()}"


def memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def load() -> tuple[float, float, float]:
    """Load averages of 1, 5 and 15 minutes."""
    return os.getloadavg()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def allowed_cores() -> list[int]:
    """The numbers of the cores that this process may use, sorted."""
    return sorted(os.sched_getaffinity(0))
