"""The production engine in virtual time: fake step results, and step times from a function.

arrivals ──> Engine.add     plan = Engine.schedule(now)     now += seconds(plan)     Engine.commit(plan, result)
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from workers.engine.engine import Engine
from workers.engine.step import StepPlan, StepResult
from workers.request import Request, TokensOut

TOKEN = 1
END = 0  # the engine's end token


@dataclass(frozen=True, slots=True)
class EngineArrival:
    """A request that gets `answer_tokens` tokens, the last one an end token."""

    at_s: float
    request: Request
    answer_tokens: int


def replay(
    engine: Engine, arrivals: Iterable[EngineArrival], seconds: Callable[[StepPlan], float]
) -> Mapping[str, Sequence[float]]:
    """Token times by request key. Arrivals are in order of time; the engine's only end token is `END`.

    A request that arrives during a step is added after the step, as in serving.
    """
    waiting = deque(arrivals)
    ends = {each.request.key: len(each.request.prompt) + each.answer_tokens - 1 for each in waiting}
    token_s: dict[str, list[float]] = defaultdict(list)
    now_s = 0.0
    while True:
        while waiting and waiting[0].at_s <= now_s:
            arrival = waiting.popleft()
            engine.add(arrival.request, arrival.at_s, hold=False)
        plan = engine.schedule(now_s)
        if plan is None:
            if not waiting:
                return token_s
            now_s = waiting[0].at_s
            continue
        took_s = seconds(plan)
        now_s += took_s
        engine.commit(plan, _fake_result(plan, ends, took_s), now_s)
        for output in engine.drain():
            assert isinstance(output, TokensOut), output
            token_s[output.key].append(now_s)


def _fake_result(plan: StepPlan, ends: Mapping[str, int], seconds: float) -> StepResult:
    tokens = tuple(
        None if chunk.draw is None else END if chunk.draw.position >= ends[chunk.key] else TOKEN
        for chunk in plan.chunks
    )
    return StepResult(plan.number, tokens, (None,) * len(tokens), (), seconds)
