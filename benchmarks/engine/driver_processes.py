"""Engines loaded in processes of their own, measured one at a time while the others are stopped."""

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
from benchmarks.engine.drivers.protocol import MARK, READY, EngineDriverConfig, Task
from benchmarks.pinning import family_cpu_s, paused
from cluster.offline.load.processes import Child, ProcessFailed

DISTURBED = 0.1  # share of the machine's CPU time that other processes may use during a measurement
LOAD_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Program:
    """A module of `drivers`, its configuration, and the Python that has its engine (None: this one)."""

    driver: str
    config: EngineDriverConfig
    python: Path | None = None
    environment: Mapping[str, str] | None = None


class DriverProcess:
    """A running driver. Its creator ends it."""

    def __init__(self, program: Program, packages: Path) -> None:
        threads = str(program.config.threads)
        environment = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"} | dict(program.environment or {})
        if program.python is not None:
            environment["PYTHONPATH"] = str(packages)
        command = [str(program.python or sys.executable), "-m", f"benchmarks.engine.drivers.{program.driver}"]
        self.child = Child([*command, program.config.text()], environment)

    def pids(self) -> list[int]:
        return [process.pid for process in self.child.family()]

    def ask(self, task: Task) -> Any:
        """The driver's measurement. Raises `ProcessFailed`."""
        self.child.write_line(task.text())
        return json.loads(self.child.wait_line(MARK, ANSWER_TIMEOUT_S).text.partition(MARK)[2])


class LoadedEngines:
    """All loaded engines. While one is measured, the others are stopped."""

    def __init__(self, loaded: Mapping[str, DriverProcess], failed: Mapping[str, str], tries: int) -> None:
        self.failed = failed
        self.tasks = self.retries = self.disturbed = 0
        self._loaded = loaded
        self._tries = tries

    @property
    def names(self) -> Sequence[str]:
        return list(self._loaded)

    def ask(self, name: str, task: Task) -> Any:
        """Measure; repeat, `tries` times at most, if other processes used the machine. Raises `ProcessFailed`."""
        others = [pid for other, driver in self._loaded.items() if other != name for pid in driver.pids()]
        self.tasks += 1
        with paused(others):
            for number in range(self._tries):
                self.retries += number > 0
                answer, foreign = self._measured(self._loaded[name], task)
                if foreign < DISTURBED:
                    return answer
        self.disturbed += 1
        return answer

    def _measured(self, driver: DriverProcess, task: Task) -> tuple[Any, float]:
        """The answer, and the share of all cores' time that other processes used."""
        begun_s, busy_s, own_s = time.perf_counter(), _busy_s(), family_cpu_s(driver.child)
        answer = driver.ask(task)
        foreign_s = (_busy_s() - busy_s) - (family_cpu_s(driver.child) - own_s)
        return answer, foreign_s / (psutil.cpu_count() or 1) / (time.perf_counter() - begun_s)


def _busy_s() -> float:
    """Busy seconds of all cores, including time stolen by other guests of the host."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "steal", 0.0))


@contextmanager
def load_engines(programs: Mapping[str, Program], tries: int = 1) -> Iterator[LoadedEngines]:
    """Load the programs; end them on exit. One that fails to load is in `failed` with its error."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        packages = Path(folder)  # the only package of ours that another environment's Python sees
        (packages / "cluster").symlink_to(Path(os.path.dirname(cluster.__file__)))
        started = {name: DriverProcess(program, packages) for name, program in programs.items()}
        for driver in started.values():
            stack.enter_context(driver.child)
        failed = {}
        for name, driver in started.items():
            try:
                driver.child.wait_line(READY, LOAD_TIMEOUT_S)
            except ProcessFailed as error:
                failed[name] = str(error)
        yield LoadedEngines({name: driver for name, driver in started.items() if name not in failed}, failed, tries)
