"""A step without progress is noticed in seconds; a slow step, or one of the first, is not interrupted."""

import asyncio

import pytest

from cluster.offline.sim import clock
from tests.engine.driving import engine, request, result
from workers.engine.engine_loop import BEAT_S, FIRST_STEPS, STALLED_S, STEP_TIMEOUT_S, EngineLoop
from workers.engine.step import StepPlan, StepResult


class Computes:
    """Steps take no time except one, which takes `slow_s`; its ticks grow or not."""

    depth = 1
    runs_ahead = False

    def __init__(self, slow_step: int, slow_s: float, *, gets_on: bool) -> None:
        self._slow = slow_step, slow_s
        self._gets_on = gets_on

    @property
    def ticks(self) -> int:
        return int(asyncio.get_running_loop().time() * 4) if self._gets_on else 7

    async def execute(self, plan: StepPlan) -> StepResult:
        if plan.number == self._slow[0]:
            await asyncio.sleep(self._slow[1])
        return result(plan)


def pumped(executor: Computes) -> float:
    """Seconds that an answer took. Raises the error that ends the engine loop."""

    async def scene() -> float:
        subject, loop = engine(), asyncio.get_running_loop()
        subject.add(request("a", (1, 2), max_tokens=20), 0.0, hold=False)
        begun_s = loop.time()
        engine_loop = EngineLoop(subject, executor, lambda emitted: None, loop.time)  # type: ignore[arg-type]
        pumping = asyncio.ensure_future(engine_loop.run())
        while subject.has_work and not pumping.done():
            await asyncio.sleep(0.01)
        took_s = loop.time() - begun_s
        engine_loop.stop()
        try:
            await pumping
        except RuntimeError as error:
            raise RuntimeError(f"{error} ({took_s:.1f})") from None
        return took_s

    return clock.run(scene())


def test_a_hanging_step_is_given_up_after_ten_seconds() -> None:
    with pytest.raises(RuntimeError, match="hangs: no rank made progress") as caught:
        pumped(Computes(FIRST_STEPS + 3, 1e6, gets_on=False))
    took_s = float(str(caught.value).rpartition("(")[2].rstrip(")"))
    assert STALLED_S <= took_s <= STALLED_S + 2 * BEAT_S


def test_a_slow_step_that_makes_progress_is_not_interrupted() -> None:
    assert pumped(Computes(FIRST_STEPS + 3, 0.9 * STEP_TIMEOUT_S, gets_on=True)) > 0.9 * STEP_TIMEOUT_S


def test_a_step_that_never_ends_is_given_up_despite_progress() -> None:
    with pytest.raises(RuntimeError, match=f"has not ended within {STEP_TIMEOUT_S:.0f} s"):
        pumped(Computes(FIRST_STEPS + 3, 1e6, gets_on=True))


def test_the_first_steps_may_compile_and_load() -> None:
    assert pumped(Computes(2, 6 * STALLED_S, gets_on=False)) >= 6 * STALLED_S
