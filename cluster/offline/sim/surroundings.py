"""What surrounds simulated workers: machines whose workers slow each other down, and the distance of a worker.

Calls to a distant worker take their time there and back, and its statistics may be old.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from cluster.runtime.interface import WorkerHandle
from workers.request import Bundle
from workers.stats import WorkerStats

Slowdown = Mapping[tuple[str, str], float]  # of a step in a pool, while a worker of another pool computes beside it


@dataclass(slots=True)
class _Step:
    pool: str
    left_s: float  # alone on the machine
    done: "asyncio.Future[None]"
    rate: float = 1.0


class Machine:
    """Shared by its workers. A step runs at 1 / its worst neighbour's slowdown while that neighbour computes."""

    def __init__(self, slowdown: Slowdown) -> None:
        self._slowdown = slowdown
        self._steps: list[_Step] = []
        self._told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def spend(self, pool: str, seconds: float) -> float:
        """Wait for a step that takes so long alone. Answers how long it took beside the others."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        step = _Step(pool, seconds, loop.create_future())
        self._advance(begin_s)
        self._steps.append(step)
        self._plan(begin_s)
        try:
            await step.done
        finally:
            now_s = loop.time()
            if step in self._steps:  # cancelled
                self._advance(now_s)
                self._steps.remove(step)
                self._plan(now_s)
        return loop.time() - begin_s

    def _advance(self, now_s: float) -> None:
        for step in self._steps:
            step.left_s -= (now_s - self._told_s) * step.rate
        self._told_s = now_s

    def _plan(self, now_s: float) -> None:
        """Set everybody's rate, and wake up when the first ends."""
        for step in self._steps:
            step.rate = 1 / max(
                (self._slowdown.get((step.pool, other.pool), 1.0) for other in self._steps if other is not step),
                default=1.0,
            )
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._steps:
            first_s = min(step.left_s / step.rate for step in self._steps)
            self._timer = asyncio.get_running_loop().call_at(now_s + max(0.0, first_s), self._end)

    def _end(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._advance(now_s)
        least_s = min(step.left_s for step in self._steps)
        for step in [step for step in self._steps if step.left_s <= max(least_s, 0.0) + 1e-12]:
            self._steps.remove(step)
            if not step.done.done():
                step.done.set_result(None)
        self._plan(now_s)


Verb = Callable[..., Awaitable[Any]]


class Distant:
    """A `WorkerHandle` whose calls take `call_s`, half of it each way. An error takes its time as an answer does.

    Bundles carry the last statistics that any bundle was given at least `stale_s` ago; outputs come in time.
    """

    def __init__(self, worker: WorkerHandle, call_s: float, stale_s: float = 0.0) -> None:
        self.worker = worker
        self._half_s = call_s / 2
        self._stale_s = stale_s
        self._told: deque[tuple[float, WorkerStats]] = deque()

    def at(self, incarnation: str) -> WorkerHandle:
        self.worker.at(incarnation)  # raises if that one is gone
        return cast(WorkerHandle, self)

    async def poll(self, *args: Any) -> Bundle:
        bundle: Bundle = await self._call("poll", *args)
        return msgspec.structs.replace(bundle, stats=self._aged(bundle.stats)) if self._stale_s else bundle

    def __getattr__(self, name: str) -> Verb:
        async def call(*args: Any) -> Any:
            return await self._call(name, *args)

        return call

    async def _call(self, name: str, *args: Any) -> Any:
        verb: Verb = getattr(self.worker, name)
        await asyncio.sleep(self._half_s)
        try:
            return await verb(*args)
        finally:
            await asyncio.sleep(self._half_s)

    def _aged(self, stats: WorkerStats) -> WorkerStats:
        """The first is told at once: nothing older is known. Kept are those of the last `stale_s` and one before."""
        told, now_s = self._told, asyncio.get_running_loop().time()
        told.append((now_s, stats))
        while len(told) > 1 and told[1][0] <= now_s - self._stale_s:
            told.popleft()
        return told[0][1]
