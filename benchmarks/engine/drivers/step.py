"""Times the parts of a Diptych step by wrapping its calls, and the steps of a worker that computes nothing.

The rest, neither executor time nor a wrapped call, is the thread switch, the event loop, the mailbox and the poll.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.engine.drivers.ours import DiptychWorker, worker_config
from benchmarks.engine.drivers.protocol import EngineDriverConfig, PhaseTimer, Task, driver_config, serve
from workers.executor import rank

VOCABULARY = 1000  # of simulated workers
ZERO_STEPS = 400


class CallTimes:
    """Seconds spent in calls, by name."""

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: object, call: str, name: str) -> None:
        """Time the owner's `call` from now on. Raises AttributeError when it does not exist."""
        setattr(owner, call, self._timed(getattr(owner, call), name))

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s[name] += time.perf_counter() - begun

        return timed

    def count_device(self, engine: Any) -> None:
        """Record the executor's time of each step, which `commit` receives."""
        commit = engine.commit

        def counted(plan: Any, result: Any, now_s: float) -> None:
            self.spent_s["device"] += result.seconds
            commit(plan, result, now_s)

        engine.commit = counted


class StepParts:
    """A real worker with timed calls, and one that computes nothing."""

    def __init__(self, config: EngineDriverConfig) -> None:
        self._times = CallTimes()
        self._times.wrap(rank, "step_arrays", "inputs")
        self._times.wrap(rank, "sample_rows", "sample")
        self._real = DiptychWorker(worker_config(config))
        engine = self._real.worker.engine
        for call in ("schedule", "commit", "drain"):
            self._times.wrap(engine, call, call)
        self._times.count_device(engine)
        with_room = EngineDriverConfig(config.model, config.threads, (("kv_blocks", "4096"),))
        self._zero = DiptychWorker(worker_config(with_room, "simulated"))

    def measure(self, task: Task) -> dict[str, float]:
        """Seconds of a step by part ("step": the whole), and tokens per second of the worker that computes nothing."""
        keys = self._real.begin(task)
        self._times.spent_s.clear()
        laps = self._real.steps(task)
        spent_s = {name: seconds / len(laps) for name, seconds in self._times.spent_s.items()}
        self._real.end(keys)
        return {"step": sum(wall_s for wall_s, _ in laps) / len(laps), **spent_s, **self._without_compute(task)}

    def _without_compute(self, task: Task) -> dict[str, float]:
        prompts = tuple(tuple(token % VOCABULARY for token in prompt) for prompt in task.prompts)
        decode = Task(prompts, ZERO_STEPS)
        keys = self._zero.begin(decode)
        watch = PhaseTimer()
        steps = len(self._zero.steps(decode))
        watch.lap()
        self._zero.end(keys)
        wall_s, cpu_s = watch.laps[0]
        tokens = steps * len(prompts)
        return {"tokens a second": tokens / wall_s, "tokens a CPU second": tokens / cpu_s}


if __name__ == "__main__":
    serve(StepParts(driver_config()).measure)
