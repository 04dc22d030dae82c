"""The loop around the engine: how many plans it keeps in flight, in which order they are committed, how it ends."""

import asyncio
import gc
import itertools
from collections.abc import Callable

import pytest

from tests.engine.driving import engine, next_token, request, result, tokens_of
from workers.engine.engine import Engine, EngineOutput
from workers.engine.engine_loop import EngineLoop
from workers.engine.step import StepPlan, StepResult
from workers.errors import RankLost
from workers.request import Request, SamplingParams, TokensOut


class Stages:
    """An executor whose plans end when the test ends them."""

    def __init__(self, depth: int, *, ahead: bool = False) -> None:
        self.depth = depth
        self.runs_ahead = ahead
        self.running: dict[int, tuple[StepPlan, asyncio.Future[StepResult]]] = {}
        self.most = 0

    async def execute(self, plan: StepPlan) -> StepResult:
        ended: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self.running[plan.number] = plan, ended
        self.most = max(self.most, len(self.running))
        try:
            return await ended
        finally:
            del self.running[plan.number]


async def pumped(subject: Engine, stages: Stages, end: Callable[[], None], count: int) -> list[EngineOutput]:
    """Runs until `count` answers have ended; `end` ends some plans whenever all others wait."""
    emitted: list[EngineOutput] = []
    engine_loop = EngineLoop(subject, stages, emitted.extend, lambda: 0.0)  # type: ignore[arg-type]
    pumping = asyncio.ensure_future(engine_loop.run())
    async with asyncio.timeout(20.0):
        while not pumping.done():
            if sum(isinstance(e, TokensOut) and e.finish is not None for e in emitted) >= count:
                engine_loop.stop()
            end()
            await asyncio.sleep(0)
        await pumping
    return emitted


@pytest.mark.parametrize("depth", [1, 2, 4])
async def test_as_many_plans_as_stages_are_in_flight_and_committed_in_order_whichever_ends_first(depth: int) -> None:
    subject, stages = engine(depth=depth), Stages(depth)
    for index in range(6):
        subject.add(request(f"r{index}", (1 + index,)), 0.0, hold=False)

    def end() -> None:
        for plan, ended in reversed(stages.running.values()):
            if not ended.done():
                ended.set_result(result(plan))

    emitted = await pumped(subject, stages, end, 6)
    assert stages.most == depth
    for index in range(6):
        assert tokens_of(emitted, f"r{index}/0") == [next_token(f"r{index}/0", 1 + n) for n in range(8)]


async def test_the_next_decodes_wait_behind_those_in_flight() -> None:
    """Each answer ends at its own length, while the step behind already has its sequence."""
    subject, stages = engine(), Stages(1, ahead=True)
    for index in range(6):
        sampling = SamplingParams(
            seed=index,
            max_tokens=30,
            stop_token_ids=(next_token(f"r{index}/0", 3 + index),),
        )
        subject.add(Request(f"r{index}", (1 + index,), sampling, reply_to="test"), 0.0, hold=False)
    turns, running = itertools.count(1), []

    def end() -> None:
        """Of the oldest plan, when the engine loop has had time to start all it can."""
        if next(turns) % 5 == 0:
            running.append(len(stages.running))
            for plan, ended in list(stages.running.values())[:1]:
                ended.set_result(result(plan))

    emitted = await pumped(subject, stages, end, 6)
    assert running == [2] * 8 + [1], "only the last plan had none behind it"
    for index in range(6):
        assert tokens_of(emitted, f"r{index}/0") == [next_token(f"r{index}/0", 1 + n) for n in range(3 + index)]
    stats = subject.stats()
    assert stats.free_blocks == stats.total_blocks
    subject.check()


async def test_a_lost_rank_ends_the_engine_loop_once_however_many_plans_it_hits() -> None:
    subject, stages = engine(depth=3), Stages(3)
    for index in range(3):
        subject.add(request(f"r{index}", (1 + index,)), 0.0, hold=False)
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def end() -> None:
        for number, (plan, ended) in stages.running.items():
            if number == 1 and not ended.done():
                ended.set_result(result(plan))  # all prompts; from here on each decodes in a plan of its own
            elif len(stages.running) == 3:
                ended.set_exception(RankLost("rank 1 is gone"))

    with pytest.raises(RankLost, match="rank 1 is gone"):
        await pumped(subject, stages, end, 3)
    await asyncio.sleep(0)
    gc.collect()  # an exception that was not retrieved is logged when its future is collected
    assert not complaints
