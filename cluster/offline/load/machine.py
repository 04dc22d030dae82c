"""Describes a measurement: date, command, seeds, machine and versions of packages. Part of every report."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

SECRET = ("--api-key",)
BUSY = 0.5  # load average per core
PACKAGES = ("diptych", "torch", "ray", "grpcio", "numpy", "nixl-cu12", "nixl-cu13", "xxhash", "transformers")


@dataclass(frozen=True, slots=True)
class MeasurementInfo:
    """`load_before`: load averages of 1, 5 and 15 minutes at the start. `endpoints`: their descriptions."""

    date: str
    command: str
    endpoints: tuple[str, ...]
    seeds: tuple[int, ...]
    system: str
    cpu: str
    cores: int
    memory_bytes: int
    load_before: tuple[float, float, float]
    versions: dict[str, str]

    @property
    def lines(self) -> tuple[str, ...]:
        """For the report."""
        load = "/".join(f"{each:.2f}" for each in self.load_before)
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        busy = "The machine was busy with other work when this started: do not quote these figures."
        return (
            f"Command: {self.command}",
            *(f"Endpoint: {each}" for each in self.endpoints),
            f"Seeds: {', '.join(map(str, self.seeds))}",
            f"Started {self.date}; {self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB, {self.system}; "
            f"load before {load} (1, 5 and 15 minutes)",
            f"Versions: {versions}",
            *([busy] if self.is_busy else []),
        )

    @property
    def is_busy(self) -> bool:
        return self.load_before[0] > BUSY * self.cores


def measurement_info(endpoints: Sequence[str], seeds: Sequence[int]) -> MeasurementInfo:
    """The current process and machine."""
    return MeasurementInfo(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(sys.argv),
        endpoints=tuple(endpoints),
        seeds=tuple(seeds),
        system=system_name(),
        cpu=cpu_name(),
        cores=len(allowed_cores()),
        memory_bytes=memory_bytes(),
        load_before=load(),
        versions=versions(),
    )


def command_line(arguments: Sequence[str]) -> str:
    """The command, ready to paste into a shell, without secrets."""
    shown, hide = ["diptych"], False
    for each in arguments[1:]:
        name, equals, _ = each.partition("=")
        shown.append("***" if hide else f"{name}=***" if equals and name in SECRET else each)
        hide = each in SECRET
    return shlex.join(shown)


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
