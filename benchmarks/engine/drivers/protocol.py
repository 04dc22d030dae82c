"""The protocol of a driver: its configuration as argument, one task per input line, one marked JSON line per answer.

Runs in every peer's Python, so it imports only the standard library.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

MARK = "@measured "  # marks an answer among the engine's own output
READY = "@ready"


@dataclass(frozen=True, slots=True)
class EngineDriverConfig:
    """What to load. `model`: a folder or a file; `options`: engine options as text."""

    model: str
    threads: int
    options: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Task:
    """What to time: `steps` decode steps of all prompts at once, or with `steps` 0 the one prompt to its first token.

    A decode's prompts are computed before, untimed.
    """

    prompts: tuple[tuple[int, ...], ...]
    steps: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))


class PhaseTimer:
    """Laps of wall time and of CPU time (user and system, all threads of this process)."""

    def __init__(self) -> None:
        self.laps: list[tuple[float, float]] = []  # (wall_s, cpu_s) of one step
        self.start()

    def start(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def lap(self, steps: int = 1) -> None:
        """End a lap and begin the next one. With `steps`, the lap is split into that many equal laps."""
        now = time.perf_counter(), time.process_time()
        self.laps += [((now[0] - self._begun[0]) / steps, (now[1] - self._begun[1]) / steps)] * steps
        self._begun = now


def driver_config() -> EngineDriverConfig:
    """This driver's configuration, from the command line."""
    read = json.loads(sys.argv[1])
    return EngineDriverConfig(read["model"], read["threads"], tuple((name, value) for name, value in read["options"]))


def serve(answer: Callable[[Task], object]) -> None:
    """Run tasks until the input ends."""
    _print(READY)
    for line in sys.stdin:
        read = json.loads(line)
        task = Task(tuple(tuple(prompt) for prompt in read["prompts"]), read["steps"])
        _print(MARK + json.dumps(answer(task)))


def _print(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")  # the engine may have left a line unfinished
    sys.stdout.flush()
