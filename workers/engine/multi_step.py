"""Runs several decode steps as one: the executor gets them in one call, their tokens are reported when somebody asks.

A step that only decodes what the step before decoded needs no scheduler, no plan and no message of its own. An executor
that knows the times of such steps beforehand (`Executor.execute_decodes`) and readers in the same process
(`DeferredReader`) make it possible to commit many at once, each with its own time: at the end of the last one, or when
the worker is read or changed. A sequence's tokens stay here over several such runs, until its reader asks for them or
the sequence ends. Apart from that, results are those of single steps.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from workers.engine.decode_steps import DecodeSteps
from workers.engine.engine import Engine, EngineOutput
from workers.engine.executor import Executor
from workers.engine.sequence import Sequence, State
from workers.engine.step import StepPlan, StepResult
from workers.request import DeferredReader, TokensOut
from workers.stats import WorkerStats

MAX_STEPS = 128
MAX_RUN_S = 100.0  # less than `STEP_TIMEOUT_S`, after which a step seems to hang


@dataclass(slots=True)
class _Deferred:
    """A sequence whose newest tokens were not reported to its reader, and their times."""

    sequence: Sequence
    reader: DeferredReader
    times_s: list[float] = field(default_factory=list)

    def take(self, newer: int = 0) -> list[TokensOut]:
        """All of them in one output. The sequence has `newer` tokens after them."""
        sequence, times_s, self.times_s = self.sequence, self.times_s, []
        if not times_s:
            return []
        stop = len(sequence.tokens) - newer
        return [
            TokensOut(
                key=sequence.key,
                first_position=sequence.num_output - newer - len(times_s),
                tokens=tuple(sequence.tokens[stop - len(times_s) : stop]),
                timing=sequence.timing(times_s[-1]),
                cached_tokens=sequence.cached_tokens,
                token_s=tuple(times_s),
            )
        ]


class MultiStep:
    """Owned by a Worker, used by its EngineLoop. `reader_of`: who gets the outputs of a sequence; None: not deferred.

    No step may take `longest_s`, after which a reader expects a heartbeat. It is the `DeferredSource` of the readers.
    """

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        reader_of: Callable[[str], DeferredReader | None],
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
        self._most_steps = min(MAX_STEPS, int(MAX_RUN_S / longest_s))
        self._run: DecodeSteps | None = None
        self._going: Items[Sequence] = ()  # sequences of these steps, if their outputs are deferred
        self._deferred: dict[str, _Deferred] = {}  # by sequence
        self._readers: dict[DeferredReader, None] = {}  # of these
        self._is_checked = True
        self._logs = False  # only the last step may change the cache log
        self._ending: DecodeSteps | None = None  # whose last step has ended and is not committed
        self._without_stats: dict[DeferredReader, None] = {}  # they have no statistics of the last step yet

    def start(self, plan: StepPlan) -> "asyncio.Future[StepResult] | None":
        """Run `plan`, which was just scheduled, and the steps that decode on after it; None: there are none.

        The result is that of the last one, for `commit`.
        """
        self._ending = None
        if self._executor.execute_decodes is None:
            return None
        readers: list[DeferredReader] = []
        for chunk in plan.chunks:
            if (reader := self._reader_of(chunk.key)) is None:
                return None
            readers.append(reader)
        logs = any([reader.reads_cache for reader in readers])
        if (count := self._engine.num_decode_steps(self._most_steps, logs=logs)) < 2:
            return None
        steps = self._executor.execute_decodes(plan, count, self._last)
        self._is_checked, self._logs = True, logs
        self._run = self._engine.begin_decodes(steps, self._on_use)
        if max(steps.seconds) >= self._longest_s:
            steps.shorten(1)
            return steps.result
        self._going = self._run.sequences
        for sequence, reader in zip(self._going, readers, strict=True):
            if sequence.key not in self._deferred:
                self._deferred[sequence.key] = _Deferred(sequence, reader)
            if reader not in self._readers:
                self._readers[reader] = None
                reader.attach(self)
        return steps.result

    def reports_to(self, reader: DeferredReader) -> bool:
        """Whether steps are running whose outputs this reader gets later."""
        return self._run is not None and reader in self._readers

    def num_unreported(self, key: str) -> int:
        deferred, run = self._deferred.get(key), self._run
        if deferred is None:
            return 0
        return len(deferred.times_s) + (0 if run is None else run.num_ended_by(self._now_s()) - run.num_settled)

    def catch_up(self, with_tokens: bool) -> None:
        """Commit the steps that have ended, except the last one, and report their statistics and perhaps tokens."""
        self._catch_up(settles=with_tokens)
        if with_tokens:
            for key in tuple(self._deferred):
                self._report(key)

    def report(self, key: str) -> None:
        """Report the tokens of this sequence so far."""
        if key in self._deferred:
            self._catch_up(settles=True)
            self._report(key)

    def _report(self, key: str) -> None:
        deferred = self._deferred.get(key)
        if deferred is not None and (outputs := deferred.take()):
            deferred.reader.on_deferred_tokens(outputs)

    def _catch_up(self, *, settles: bool) -> None:
        """Commit what has ended by now, which changes the statistics, and perhaps settle it: tokens and their times."""
        run = self._run
        if run is None:
            return
        before, ended = run.num_ended, run.num_ended_by(self._now_s())
        if ended > before:
            self._engine.count_decodes(run.steps.seconds[before:ended])
            run.commit(ended)
            stats = self._stats()
            for reader in self._readers:
                reader.on_deferred_stats(stats, run.steps.ends_s[ended - 1])
        if settles and (times_s := run.settle()):
            for deferred in self._deferred.values():
                deferred.times_s += times_s

    def _on_use(self, is_change: bool) -> None:
        """The engine is about to be read or changed."""
        self._catch_up(settles=is_change)
        if is_change and self._is_checked:
            self._is_checked = False
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        """The engine has changed: steps behind the one in flight may no longer decode the same sequences."""
        self._is_checked = True
        if self._run is not None:
            ended = self._run.num_ended
            left = len(self._run.steps.ends_s) - ended
            count = max(1, self._engine.num_decode_steps(left, logs=self._logs))
            if count < left:
                self._run.steps.shorten(ended + count)

    def _last(self) -> int:
        """The last step has ended."""
        self._catch_up(settles=True)
        assert self._run is not None, "the last step ends once"
        self._ending, self._run = self._run, None
        return self._engine.end_decodes()

    def commit(self, result: StepResult, now_s: float) -> bool:
        """Commit the last one of such steps. False: the result is that of another step."""
        decodes, self._ending = self._ending, None
        if decodes is None:
            return False
        self._engine.commit_decodes(decodes, result, now_s, deferred=bool(self._going))
        for sequence in self._going:
            if sequence.state is State.RUNNING and (deferred := self._deferred.get(sequence.key)) is not None:
                deferred.times_s.append(now_s)
                self._without_stats[deferred.reader] = None
        self._going = ()
        return True

    def with_deferred(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """The engine's outputs, with the unreported tokens of sequences that have left the combined steps."""
        if not self._deferred:
            return outputs
        outputs_now, before = list[EngineOutput](), len(self._deferred)
        for output in outputs:
            deferred = self._deferred.get(output.key)
            if deferred is None or (deferred.sequence in self._going and not deferred.times_s):
                outputs_now.append(output)
                continue
            del self._deferred[output.key]
            outputs_now += [*deferred.take(newer=isinstance(output, TokensOut)), output]
        for key in [key for key, deferred in self._deferred.items() if deferred.sequence not in self._going]:
            outputs_now += self._deferred.pop(key).take()
        if len(self._deferred) < before:
            readers = dict.fromkeys([deferred.reader for deferred in self._deferred.values()])
            for reader in self._readers.keys() - readers.keys():
                reader.attach(None)
            self._readers = readers
        if self._without_stats:
            stats = self._stats()
            for reader in self._without_stats:
                reader.on_deferred_stats(stats, self._now_s())
            self._without_stats.clear()
        return outputs_now
