"""The one loop that drives an engine: keep plans in flight, commit the oldest, hand out what came of it.

Knows the engine's three verbs and the executor's one; knows no request and no wire.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from workers.engine.engine import Engine, Told
from workers.engine.executor import Executor
from workers.engine.step import StepPlan, StepResult

STEP_TIMEOUT_S = 120.0  # a device that hangs makes its worker unfit; no step of a sane budget takes so long


class Pump:
    """Owned by a Worker. `deliver` gets the engine's outputs after every change; `wake` says that there is work."""

    def __init__(
        self, engine: Engine, executor: Executor, deliver: Callable[[list[Told]], None], now_s: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._deliver = deliver
        self._now_s = now_s
        self._work = asyncio.Event()
        self._closing = False

    def wake(self) -> None:
        self._work.set()

    def stop(self) -> None:
        """Let the plans in flight end, then return from `run`."""
        self._closing = True
        self._work.set()

    async def run(self) -> None:
        """Until `stop`. An executor's error ends it: the worker is then unfit and must be replaced."""
        in_flight: deque[tuple[StepPlan, asyncio.Task[StepResult]]] = deque()
        try:
            while True:
                self._work.clear()
                self._fill(in_flight)
                if in_flight:
                    await self._oldest_or_work(in_flight)
                elif self._closing:
                    return
                else:
                    await self._work.wait()
        finally:
            for _, task in in_flight:
                task.cancel()

    def _fill(self, in_flight: "deque[tuple[StepPlan, asyncio.Task[StepResult]]]") -> None:
        while not self._closing and len(in_flight) < self._executor.depth:
            plan = self._engine.schedule(self._now_s())
            if plan is None:
                break
            in_flight.append((plan, asyncio.ensure_future(self._executor.execute(plan))))
        self._deliver(self._engine.drain())

    async def _oldest_or_work(self, in_flight: "deque[tuple[StepPlan, asyncio.Task[StepResult]]]") -> None:
        plan, task = in_flight[0]
        if len(in_flight) < self._executor.depth and not task.done():
            work = asyncio.ensure_future(self._work.wait())
            await asyncio.wait({task, work}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            if not task.done():
                return
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                result = await task
        except TimeoutError:
            raise RuntimeError(f"step {plan.number} has not ended within {STEP_TIMEOUT_S:.0f} s") from None
        in_flight.popleft()
        self._engine.commit(plan, result, self._now_s())
        self._deliver(self._engine.drain())
