"""What a machine does to the workers on it: steps that share its memory and caches slow each other down."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

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
