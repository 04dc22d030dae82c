"""Engines loaded in processes of their own, asked one at a time while the others stand still."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import cluster
from benchmarks.engine.drivers.lines import MARK, READY, Order, Task
from benchmarks.pinning import family_cpu_s, paused
from cluster.offline.load.processes import Child, ProcessFailed

DISTURBED = 0.1  # of the machine's time: what others may take while somebody is asked
LOAD_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Program:
    """A module of `drivers`, what it is to load, and the Python that has its engine (None: our own)."""

    driver: str
    order: Order
    python: Path | None = None
    environment: Mapping[str, str] | None = None


class Driven:
    """A program that is running. Ended by whoever started it."""

    def __init__(self, program: Program, packages: Path) -> None:
        threads = str(program.order.threads)
        environment = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"} | dict(program.environment or {})
        if program.python is not None:
            environment["PYTHONPATH"] = str(packages)
        command = [str(program.python or sys.executable), "-m", f"benchmarks.engine.drivers.{program.driver}"]
        self.child = Child([*command, program.order.text()], environment)

    def pids(self) -> list[int]:
        return [process.pid for process in self.child.family()]

    def ask(self, task: Task) -> Any:
        """What the driver measured. Raises `ProcessFailed`."""
        self.child.write_line(task.text())
        return json.loads(self.child.wait_line(MARK, ANSWER_TIMEOUT_S).text.partition(MARK)[2])


class Stage:
    """All that are loaded. Whoever is asked has the machine for itself."""

    def __init__(self, loaded: Mapping[str, Driven], failed: Mapping[str, str], tries: int) -> None:
        self.failed = failed
        self.asked = self.asked_again = self.disturbed = 0
        self._loaded = loaded
        self._tries = tries

    @property
    def names(self) -> Sequence[str]:
        return list(self._loaded)

    def ask(self, name: str, task: Task) -> Any:
        """Again, as often as there are tries, when others took the machine meanwhile. Raises `ProcessFailed`."""
        others = [pid for other, driven in self._loaded.items() if other != name for pid in driven.pids()]
        self.asked += 1
        with paused(others):
            for number in range(self._tries):
                self.asked_again += number > 0
                answer, foreign = self._asked(self._loaded[name], task)
                if foreign < DISTURBED:
                    return answer
        self.disturbed += 1
        return answer

    def _asked(self, driven: Driven, task: Task) -> tuple[Any, float]:
        """The answer, and the share of all cores' time that went to anybody else."""
        begun_s, busy_s, own_s = time.perf_counter(), _busy_s(), family_cpu_s(driven.child)
        answer = driven.ask(task)
        foreign_s = (_busy_s() - busy_s) - (family_cpu_s(driven.child) - own_s)
        return answer, foreign_s / (psutil.cpu_count() or 1) / (time.perf_counter() - begun_s)


def _busy_s() -> float:
    """Seconds that all cores have worked for anybody, other guests of the same host included."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "steal", 0.0))


@contextmanager
def stage(programs: Mapping[str, Program], tries: int = 1) -> Iterator[Stage]:
    """The programs, loaded one beside the other; ended at the end. One that does not load is in `failed`, with why."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        packages = Path(folder)  # all that another Python sees of ours: its site packages are its own
        (packages / "cluster").symlink_to(Path(os.path.dirname(cluster.__file__)))
        started = {name: Driven(program, packages) for name, program in programs.items()}
        for driven in started.values():
            stack.enter_context(driven.child)
        failed = {}
        for name, driven in started.items():
            try:
                driven.child.wait_line(READY, LOAD_TIMEOUT_S)
            except ProcessFailed as error:
                failed[name] = str(error)
        yield Stage({name: driven for name, driven in started.items() if name not in failed}, failed, tries)
