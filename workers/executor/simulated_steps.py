"""Steps that decode the same sequences, one token each, by a simulated executor: their times are known beforehand."""

import asyncio
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate

from workers.costs import CostModel
from workers.engine.estimate import step_parts
from workers.engine.step import StepPlan, StepResult

Observe = Callable[[StepPlan, Items[float], Items[float], Items[int]], None]
"""Steps of this plan in a row: the seconds of each, the end of its last stage, and the blocks that were in use (none:
as many as now). Called when they have ended.
"""

Finish = Callable[[StepPlan, int, float, float, float], StepResult]  # plan, number, begin, end, seconds


class SimulatedSteps:
    """`RunningDecodes` of a simulated executor with one stage, which begins at `begin_s`.

    `lent_s`: by which attention for borrowers delays the first step. `observe` gets each step but the last, `finish`
    makes the result of the last one, whose number `last` knows.
    """

    def __init__(
        self,
        plan: StepPlan,
        count: int,
        begin_s: float,
        cost: CostModel,
        *,
        lent_s: float,
        observe: Observe | None,
        last: Callable[[], int],
        finish: Finish,
        never: frozenset[int],
        vocab_size: int,
    ) -> None:
        _, batch, context_tokens = step_parts(plan)
        self.seconds = cost.steps_seconds(batch, context_tokens, count)
        self.seconds[0] += lent_s
        self._times_s = [*accumulate(self.seconds, initial=begin_s)]
        self.ends_s = self._times_s[1:]
        loop = asyncio.get_running_loop()
        self.result: asyncio.Future[StepResult] = loop.create_future()
        self._plan = plan
        self._observe = observe
        self._last = last
        self._finish = finish
        self._never = never
        self._vocab_size = vocab_size
        self._timer = loop.call_at(self.ends_s[-1], self._end)

    def observe(self, first: int, used: list[int]) -> None:
        if self._observe is not None:
            stop = first + len(used)
            self._observe(self._plan, self.seconds[first:stop], self.ends_s[first:stop], used)

    def sample(self, key: str, position: int, count: int) -> list[int]:
        return simulated_tokens(key, position, count, self._vocab_size, self._never)

    def shorten(self, count: int) -> None:
        del self.seconds[count:], self.ends_s[count:], self._times_s[count + 1 :]
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self.ends_s[-1], self._end)

    def _end(self) -> None:
        if self.result.done():  # the caller was cancelled
            return
        try:
            begin_s, end_s = self._times_s[-2:]
            self.result.set_result(self._finish(self._plan, self._last(), begin_s, end_s, self.seconds[-1]))
        except Exception as error:
            self.result.set_exception(error)


def simulated_tokens(
    key: str, position: int, count: int, vocab_size: int, never: frozenset[int] = frozenset()
) -> list[int]:
    """The tokens that a simulated worker samples from `position` of the sequence on; the same in every attempt.

    Skips the tokens in `never` (the end tokens, so that a simulated answer ends by its length).
    """
    first = zlib.crc32(key.partition("/")[0].encode()) + 7919 * position
    tokens = [each % vocab_size for each in range(first, first + 7919 * count, 7919)]
    if not never.isdisjoint(tokens):
        for index, token in enumerate(tokens):
            if token in never:
                free = (each % vocab_size for each in range(token + 1, token + vocab_size))
                tokens[index] = next((each for each in free if each not in never), token)
    return tokens
