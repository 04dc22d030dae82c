"""The loop that drives an engine: keeps plans in flight, commits the oldest, delivers the outputs.

Knows four members of the engine and one of the executor; knows no request and no network.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from workers.engine.engine import Engine, EngineOutput
from workers.engine.executor import Executor
from workers.engine.multi_step import MultiStep
from workers.engine.step import BrokenStep, StepPlan, StepResult
from workers.engine.timer import Timer
from workers.errors import RankLost

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 120.0  # a device that hangs makes its worker unhealthy; no step with a sane budget takes so long
STALLED_S = 10.0  # a step hangs when no rank makes progress for so long
BEAT_S = 1.0  # stalls are counted in beats of this process, so a pause of the process is no stall
FIRST_STEPS = 8  # these may compile or load from disk: only `STEP_TIMEOUT_S` bounds them
MAX_FAILURES = 3  # this many failed steps in a row: the device is at fault, not the requests


class EngineLoop:
    """Owned by a Worker. `deliver` gets the engine's outputs after every change; call `wake` when there is new work."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        deliver: Callable[[list[EngineOutput]], None],
        now_s: Callable[[], float],
        multi_step: MultiStep | None = None,
    ) -> None:
        self._multi_step = multi_step
        self._engine = engine
        self._executor = executor
        self._deliver = deliver
        self._now_s = now_s
        self._work = asyncio.Event()
        self._closing = False
        self._in_flight: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        self._watch = Timer(self._check_progress)
        self._begun_s = 0.0  # when the wait for the oldest step began
        self._ticks, self._still = 0, 0  # last ticks seen, and for how many beats
        self._good_steps = 0
        self._gave_up = ""
        self._failures = 0  # since the last good step

    def wake(self) -> None:
        self._work.set()

    def stop(self) -> None:
        """Let the plans in flight end, then return from `run`."""
        self._closing = True
        self._work.set()

    async def run(self) -> None:
        """Run until `stop`. A failed step fails its requests.

        Raises when the worker is unhealthy and must be replaced: the device hangs or fails repeatedly, a rank is lost,
        or `Engine.check` fails.
        """
        in_flight = self._in_flight
        try:
            while True:
                self._work.clear()
                self._fill()
                if in_flight:
                    if self._executor.runs_ahead:
                        await asyncio.sleep(0)  # the step starts and outputs leave first
                        self._run_ahead()
                    await self._oldest_or_work()
                elif self._closing:
                    return
                else:
                    await self._wait()
        finally:
            self._watch.close()
            for _, step in in_flight:
                step.cancel()

    def _fill(self) -> None:
        """Start steps, then deliver what the last one computed: the device need not wait while it is sent."""
        while not self._closing and len(self._in_flight) < self._executor.depth:
            if not self._start(ahead=False):
                break
        self._deliver(self._engine.drain())

    def _run_ahead(self) -> None:
        """Give the device a step that it can begin when the one in flight has ended."""
        if not self._closing and len(self._in_flight) == self._executor.depth:
            self._start(ahead=True)

    def _start(self, *, ahead: bool) -> bool:
        """False: there is no step to start."""
        try:
            plan = self._engine.schedule(self._now_s(), ahead=ahead)
        except BrokenStep as broken:
            self._in_flight.append((broken.plan, asyncio.ensure_future(_fail(broken.__cause__ or broken))))
            return True
        if plan is not None:
            several = self._multi_step.start(plan) if self._multi_step is not None else None
            self._in_flight.append((plan, several or asyncio.ensure_future(self._executor.execute(plan))))
        return plan is not None

    async def _wait(self) -> None:
        """For work, or until a prompt has waited long enough for its blocks."""
        seconds = self._engine.wakes_at_s - self._now_s()
        if math.isinf(seconds):
            await self._work.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._work.wait()

    async def _oldest_or_work(self) -> None:
        step = self._in_flight[0][1]
        if len(self._in_flight) < self._executor.depth and not step.done():
            work = asyncio.ensure_future(self._work.wait())
            either: set[asyncio.Future[Any]] = {step, work}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            if not step.done():
                return
        plan, result = await self._oldest()
        if isinstance(result, Exception):
            await self._recover(plan, result)
        else:
            if self._multi_step is None or not self._multi_step.commit(result, self._now_s()):
                self._engine.commit(plan, result, self._now_s())
            self._failures = 0
            self._good_steps += 1

    async def _oldest(self) -> tuple[StepPlan, StepResult | Exception]:
        """Wait for the oldest plan; returns it with its result or error."""
        plan, step = self._in_flight[0]
        self._begun_s, self._still = self._now_s(), 0
        self._watch.start(BEAT_S)
        try:
            return plan, await step
        except asyncio.CancelledError:
            if self._gave_up:
                raise RuntimeError(f"step {plan.number} {self._gave_up}") from None
            raise
        except RankLost:
            raise
        except Exception as error:
            return plan, error
        finally:
            self._watch.stop()
            self._in_flight.popleft()

    async def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Fail the requests of this step and of later ones, which may depend on its copies; then continue."""
        logger.error("step %d failed, with %d requests in it", plan.number, len(plan.chunks), exc_info=error)
        plans = [plan]
        while self._in_flight:
            plans.append((await self._oldest())[0])
        self._engine.steps_failed(plans, f"a step failed: {type(error).__name__}: {error}")
        self._engine.check()
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise error

    def _check_progress(self) -> None:
        """Check for progress, once each beat while waiting for a step."""
        ticks = self._executor.ticks
        self._still = self._still + 1 if ticks == self._ticks else 0
        self._ticks = ticks
        if self._now_s() - self._begun_s >= STEP_TIMEOUT_S:
            self._gave_up = f"has not ended within {STEP_TIMEOUT_S:.0f} s"
        elif self._still * BEAT_S >= STALLED_S and self._good_steps >= FIRST_STEPS:
            self._gave_up = f"hangs: no rank made progress for {STALLED_S:.0f} s"
        else:
            return self._watch.start(BEAT_S)
        self._in_flight[0][1].cancel()


async def _fail(error: BaseException) -> StepResult:
    raise error
