"""Runs steps that are alike as one: the executor gets them in one call, their tokens are told when somebody asks.

A step that only decodes what the step before decoded needs no scheduler, no plan and no message of its own. An executor
that knows the times of such steps beforehand (`Executor.repeat`) and readers in the same process (`LateReader`) make it
possible to commit many at once, with each one's own time: at the end of the last one, or when somebody looks at the
worker or changes it. Nothing else may tell the two ways apart.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items

from workers.engine.engine import Engine
from workers.engine.executor import Executor, RepeatedStep
from workers.engine.step import StepPlan, StepResult
from workers.request import LateReader, TokensOut
from workers.stats import WorkerStats

MOST_STEPS = 128


class Repeats:
    """Owned by a Worker, used by its Pump. `reader_of`: who gets the outputs of a sequence; None: not late.

    No step may take `longest_s`, after which a reader expects a sign of life.
    """

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        reader_of: Callable[[str], LateReader | None],
        stats: Callable[[], WorkerStats],
        now_s: Callable[[], float],
        longest_s: float,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._reader_of = reader_of
        self._stats = stats
        self._now_s = now_s
        self._longest_s = longest_s
        self._steps: RepeatedStep | None = None  # they run now
        self._readers: dict[str, LateReader] = {}  # by sequence
        self._ended = 0
        self._is_checked = True
        self._is_telling = False
        self.last_plan = StepPlan(0, ())

    def start(self, plan: StepPlan) -> "asyncio.Future[StepResult] | None":
        """Run `plan`, which was just scheduled, and the steps after it that are alike; None: there are none.

        The result is that of the last one, whose plan is then `last_plan`.
        """
        if self._executor.repeat is None or (count := self._engine.num_alike(MOST_STEPS)) < 2:
            return None
        readers = {chunk.key: self._reader_of(chunk.key) for chunk in plan.chunks}
        late = {key: reader for key, reader in readers.items() if reader is not None}
        if len(late) < len(readers):
            return None
        steps = self._executor.repeat(plan, count, self._last)
        if max(steps.seconds) >= self._longest_s:
            steps.shorten(1)
            late = {}
        self._steps, self._readers, self._ended, self._is_checked = steps, late, 0, True
        self._engine.begin_alike(steps.sample, self._on_use)
        return steps.result

    @property
    def begun_s(self) -> float:
        """When the step in flight began, if it is one of these and not the first; else 0."""
        self.catch_up(False)
        return self._steps.ends_s[self._ended - 1] if self._steps is not None and self._ended else 0.0

    def is_told(self, reader: LateReader | None) -> bool:
        """Whether steps run whose outputs this reader gets late."""
        return self._steps is not None and reader in self._readers.values()

    def catch_up(self, with_tokens: bool) -> None:
        """Commit and tell what has ended by now, but for the last step."""
        steps = self._steps
        if steps is None or self._is_telling:
            return
        ended = min(bisect_right(steps.ends_s, self._now_s(), self._ended), len(steps.ends_s) - 1)
        if ended > self._ended:
            for index in range(self._ended, ended):
                steps.end(index)
                self._engine.next_alike(steps.seconds[index])
            self._ended = ended
            self._tell(lambda: self._tell_stats(steps.ends_s[ended - 1]))
        if with_tokens:
            self._tell(lambda: self._tell_tokens(steps.ends_s[:ended]))

    def _tell(self, tell: Callable[[], None]) -> None:
        self._is_telling = True
        try:
            tell()
        finally:
            self._is_telling = False

    def _tell_stats(self, at_s: float) -> None:
        stats = self._stats()
        for reader in dict.fromkeys(self._readers.values()):
            reader.on_late_stats(stats, at_s)

    def _tell_tokens(self, ends_s: Items[float]) -> None:
        outputs: dict[LateReader, list[TokensOut]] = {}
        for output in self._engine.drain_alike(ends_s):
            outputs.setdefault(self._readers[output.key], []).append(output)
        for reader, group in outputs.items():
            reader.on_late_tokens(group)

    def _on_use(self, is_change: bool) -> None:
        """The engine is about to be read or changed."""
        self.catch_up(is_change)
        if is_change and self._is_checked:
            self._is_checked = False
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        """The engine has changed: the steps behind the one in flight may no longer be alike."""
        self._is_checked = True
        if self._steps is not None:
            left = len(self._steps.ends_s) - self._ended
            alike = max(1, self._engine.num_alike(left))
            if alike < left:
                self._steps.shorten(self._ended + alike)

    def _last(self) -> StepPlan:
        """The last step has ended."""
        self.catch_up(True)
        self._steps = None
        self.last_plan = self._engine.end_alike()
        return self.last_plan
