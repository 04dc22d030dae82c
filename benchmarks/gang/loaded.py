"""Workers to be measured, each under a `driver` in a process of its own."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from benchmarks.engine.drivers.lines import MARK, READY
from benchmarks.gang.driver import Order
from benchmarks.gang.recorded import Executed
from cluster.offline.load.processes import Child

LOAD_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 120.0


class Loaded:
    """A worker that has started."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def ask(self, *task: str | int) -> list[Executed]:
        """The plans that the task came to. Raises `ProcessFailed`."""
        self._child.write_line(json.dumps(task))
        told = self._child.wait_line(MARK, ANSWER_TIMEOUT_S).text.partition(MARK)[2]
        return msgspec.json.decode(told, type=list[Executed])


@contextmanager
def loaded(order: Order) -> Iterator[Loaded]:
    """Ended on the way out, with all its ranks. Raises `ProcessFailed` when it does not start."""
    command = [sys.executable, "-m", "benchmarks.gang.driver", msgspec.json.encode(order).decode()]
    environment = {"OMP_NUM_THREADS": str(order.threads), "HF_HUB_OFFLINE": "1"}
    with Child(command, environment) as child:
        child.wait_line(READY, LOAD_TIMEOUT_S)
        yield Loaded(child)
