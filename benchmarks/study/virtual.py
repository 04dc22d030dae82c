"""The production engine in virtual time: what steps give is made up, what they take says a function. Knows no model.

arrivals ──> Engine.add     plan = Engine.schedule(now)     now += seconds(plan)     Engine.commit(plan, made up)
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
class Arrival:
    """`answer_tokens` come out, the last of them an end token."""

    at_s: float
    request: Request
    answer_tokens: int


def replay(
    engine: Engine, arrivals: Iterable[Arrival], seconds: Callable[[StepPlan], float]
) -> Mapping[str, Sequence[float]]:
    """When each request's tokens came, by its key. Arrivals in order of time; the engine's only end token is `END`.

    A request that comes during a step is seen when the step has ended, as in service.
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
        engine.commit(plan, _made_up(plan, ends, took_s), now_s)
        for output in engine.drain():
            assert isinstance(output, TokensOut), output
            token_s[output.key].append(now_s)


def _made_up(plan: StepPlan, ends: Mapping[str, int], seconds: float) -> StepResult:
    tokens = tuple(
        None if chunk.draw is None else END if chunk.draw.position >= ends[chunk.key] else TOKEN
        for chunk in plan.chunks
    )
    return StepResult(plan.number, tokens, (None,) * len(tokens), (), seconds)
