"""Starts a measured worker: `driver` in a process of its own."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from benchmarks.engine.drivers.protocol import MARK, READY
from benchmarks.gang.driver import GangWorkerConfig
from benchmarks.gang.plan_times import PlanTime
from cluster.offline.load.processes import Child

LOAD_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 120.0


class WorkerProcess:
    """A started worker."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def run(self, *task: str | int) -> list[PlanTime]:
        """Run a task of `driver`; returns its plans. Raises `ProcessFailed`."""
        self._child.write_line(json.dumps(task))
        answer = self._child.wait_line(MARK, ANSWER_TIMEOUT_S).text.partition(MARK)[2]
        return msgspec.json.decode(answer, type=list[PlanTime])


@contextmanager
def worker_process(config: GangWorkerConfig) -> Iterator[WorkerProcess]:
    """Start a worker; end it and its ranks on exit. Raises `ProcessFailed` when it does not start."""
    command = [sys.executable, "-m", "benchmarks.gang.driver", msgspec.json.encode(config).decode()]
    environment = {"OMP_NUM_THREADS": str(config.threads), "HF_HUB_OFFLINE": "1"}
    with Child(command, environment) as child:
        child.wait_line(READY, LOAD_TIMEOUT_S)
        yield WorkerProcess(child)
