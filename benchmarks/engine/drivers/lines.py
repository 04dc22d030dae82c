"""How a driver is spoken to: its order in the argument, then one task a line in, one marked line of JSON out.

Knows no engine. Runs in every peer's Python, so it needs the standard library only.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

MARK = "@measured "  # before an answer: whatever else an engine prints stands on other lines
READY = "@ready"


@dataclass(frozen=True, slots=True)
class Order:
    """What to load. `model` is a folder or a file; `options` are the engine's own, each a text."""

    model: str
    threads: int
    options: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Task:
    """What to time: `steps` decode steps of all prompts at once, or with `steps` 0 the one prompt to its first token.

    Prompts of a decode are computed before, untimed.
    """

    prompts: tuple[tuple[int, ...], ...]
    steps: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))


class Watch:
    """Laps on both clocks: wall, and user and system time of all threads of this process."""

    def __init__(self) -> None:
        self.laps: list[tuple[float, float]] = []  # (wall_s, cpu_s) of one step
        self.start()

    def start(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def lap(self, steps: int = 1) -> None:
        """A lap ends, the next begins; `steps` of them when they came out together."""
        now = time.perf_counter(), time.process_time()
        self.laps += [((now[0] - self._begun[0]) / steps, (now[1] - self._begun[1]) / steps)] * steps
        self._begun = now


def order() -> Order:
    """What this driver is to load."""
    read = json.loads(sys.argv[1])
    return Order(read["model"], read["threads"], tuple((name, value) for name, value in read["options"]))


def serve(answer: Callable[[Task], object]) -> None:
    """Answer tasks until the input ends."""
    _say(READY)
    for line in sys.stdin:
        read = json.loads(line)
        task = Task(tuple(tuple(prompt) for prompt in read["prompts"]), read["steps"])
        _say(MARK + json.dumps(answer(task)))


def _say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")  # something may stand unfinished on the last line
    sys.stdout.flush()
