"""Describes a measurement: date, command, seeds, machine and versions. Part of every report."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from cluster.offline.load import machine

SECRET = ("--api-key",)
BUSY = 0.5  # load average per core


@dataclass(frozen=True, slots=True)
class About:
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def about(endpoints: Sequence[str], seeds: Sequence[int]) -> About:
    """The current process and machine."""
    return About(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(sys.argv),
        endpoints=tuple(endpoints),
        seeds=tuple(seeds),
        system=machine.system_name(),
        cpu=machine.cpu_name(),
        cores=len(machine.allowed_cores()),
        memory_bytes=machine.memory_bytes(),
        load_before=machine.load(),
        versions=machine.versions(),
    )


def command_line(arguments: Sequence[str]) -> str:
    """The command, ready to paste into a shell, without secrets."""
    shown, hide = ["diptych"], False
    for each in arguments[1:]:
        name, equals, _ = each.partition("=")
        shown.append("***" if hide else f"{name}=***" if equals and name in SECRET else each)
        hide = each in SECRET
    return shlex.join(shown)
