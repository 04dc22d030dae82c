"""Runs several decode steps as one: the executor gets them in one call, their tokens are reported when somebody asks.

A step that only decodes what the step before decoded needs no scheduler, no plan and no message of its own. An executor
that knows the times of such steps beforehand (`Executor.execute_decodes`) and readers in the same process
(`LateReader`) make it possible to commit many at once, with each one's own time: at the end of the last one, or when
somebody looks at the worker or changes it. Nothing else may tell the two ways apart.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from workers.engine.decode_steps import DecodeSteps
from workers.engine.engine import Engine
from workers.engine.executor import Executor, RunningDecodes
from workers.engine.step import StepPlan, StepResult
from workers.request import LateReader, TokensOut
from workers.stats import WorkerStats

MAX_STEPS = 128


class _Run(NamedTuple):
    """Steps that run as one: in the executor and in the engine."""

    steps: RunningDecodes
    decodes: DecodeSteps


class MultiStep:
    """Owned by a Worker, used by its EngineLoop. `reader_of`: who gets the outputs of a sequence; None: not late.

    No step may take `longest_s`, after which a reader expects a sign of life. It is the `LateSource` of the readers.
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
        self._run: _Run | None = None
        self._reader: dict[str, LateReader] = {}  # by sequence
        self._readers: tuple[LateReader, ...] = ()
        self._ended = self._committed = self._reported = 0  # of the steps
        self._is_checked = True
        self._logs = False  # only the last step may change the cache log
        self._is_catching_up = False
        self.last_plan = StepPlan(0, ())

    def start(self, plan: StepPlan) -> "asyncio.Future[StepResult] | None":
        """Run `plan`, which was just scheduled, and the steps that decode on after it; None: there are none.

        The result is that of the last one, whose plan is then `last_plan`.
        """
        if self._executor.execute_decodes is None:
            return None
        readers = {chunk.key: self._reader_of(chunk.key) for chunk in plan.chunks}
        late = {key: reader for key, reader in readers.items() if reader is not None}
        logs = any(reader.reads_cache for reader in late.values())
        if len(late) < len(readers) or (count := self._engine.num_decode_steps(MAX_STEPS, logs=logs)) < 2:
            return None
        steps = self._executor.execute_decodes(plan, count, self._last)
        if max(steps.seconds) >= self._longest_s:
            steps.shorten(1)
            late = {}
        self._reader, self._readers = late, tuple(dict.fromkeys(late.values()))
        self._ended = self._committed = self._reported = 0
        self._is_checked, self._logs = True, logs
        self._run = _Run(steps, self._engine.begin_decodes(steps.sample, self._on_use))
        for reader in self._readers:
            reader.attach(self)
        return steps.result

    @property
    def begun_s(self) -> float:
        """When the step in flight began, if it is one of these and not the first; else 0."""
        if self._run is None:
            return 0.0
        ended = self._num_ended(self._run.steps)
        return self._run.steps.ends_s[ended - 1] if ended else 0.0

    def _num_ended(self, steps: RunningDecodes) -> int:
        """By now, without the last one."""
        return bisect_right(steps.ends_s, self._now_s(), self._ended, len(steps.ends_s) - 1)

    def reports_to(self, reader: LateReader | None) -> bool:
        """Whether steps run whose outputs this reader gets late."""
        return self._run is not None and reader in self._readers

    def num_unreported(self, key: str) -> int:
        if self._run is None or key not in self._reader:
            return 0
        return self._num_ended(self._run.steps) - self._reported

    def catch_up(self, with_tokens: bool) -> None:
        """Count and tell what has ended by now, but for the last step."""
        self._catch_up(commits=with_tokens, reports=with_tokens)

    def _catch_up(self, *, commits: bool, reports: bool) -> None:
        run = self._run
        if run is None or self._is_catching_up:
            return
        ended = self._num_ended(run.steps)
        if ended == self._ended and not commits:
            return
        self._is_catching_up = True
        try:
            self._count(run, ended)
            if commits and self._committed < self._ended:
                self._commit(run, self._ended)
            if reports and self._reported < self._ended:
                self._report_tokens(run)
        finally:
            self._is_catching_up = False

    def _count(self, run: _Run, ended: int) -> None:
        """These steps have ended by now: tell the statistics."""
        steps = run.steps
        if ended > self._ended:
            self._engine.count_decodes(steps.seconds[self._ended : ended])
            self._ended = ended
            while (filled := self._committed + run.decodes.num_until_filled) <= ended:
                self._commit(run, filled)
            stats = self._stats()
            for reader in self._readers:
                reader.on_late_stats(stats, steps.ends_s[ended - 1])

    def _commit(self, run: _Run, stop: int) -> None:
        """The steps up to this one."""
        run.steps.observe(self._committed, stop)
        run.decodes.commit(run.steps.seconds[self._committed : stop])
        self._committed = stop

    def _report_tokens(self, run: _Run) -> None:
        self._reported = self._ended
        outputs: dict[LateReader, list[TokensOut]] = {}
        for output in run.decodes.outputs(run.steps.ends_s[: self._ended]):
            outputs.setdefault(self._reader[output.key], []).append(output)
        for reader, group in outputs.items():
            reader.on_late_tokens(group)

    def _on_use(self, is_change: bool) -> None:
        """The engine is about to be read or changed."""
        self._catch_up(commits=is_change, reports=False)
        if is_change and self._is_checked:
            self._is_checked = False
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        """The engine has changed: those behind the step in flight may no longer decode the same."""
        self._is_checked = True
        if self._run is not None:
            left = len(self._run.steps.ends_s) - self._ended
            count = max(1, self._engine.num_decode_steps(left, logs=self._logs))
            if count < left:
                self._run.steps.shorten(self._ended + count)

    def _last(self) -> StepPlan:
        """The last step has ended."""
        self.catch_up(True)
        for reader in self._readers:
            reader.attach(None)
        assert self._run is not None, "the last step ends once"
        self.last_plan = self._engine.end_decodes(self._run.decodes)
        self._run = None
        return self.last_plan
