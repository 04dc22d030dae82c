"""The same engine with a real executor on the wall clock: the naive sweep, and cells to validate virtual time."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.figures import Progress
from benchmarks.study.answers import StudyFigures, StudyRun, figures, run
from benchmarks.study.cells import CHUNKED, KV_BLOCKS, PREFILL_FIRST, REFERENCE, capacity, rate
from benchmarks.study.workload import StudyRequest, study_requests
from kvtransfer.open import RESERVED_BLOCKS
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.costs import CostModel
from workers.engine.engine import Engine, EngineOutput
from workers.engine.engine_loop import EngineLoop
from workers.engine.estimate import plan_seconds
from workers.engine.executor import Executor, ModelFacts
from workers.engine.step import StepPlan, StepResult
from workers.request import TokensOut

THREADS = 2
ARRIVALS_S = 25.0  # how long requests arrive in a real cell
LOAD, SEED = 0.7, 0
REAL_CELLS = ((PREFILL_FIRST, "long/short"), (CHUNKED[1], "long/short"), (REFERENCE, "short/short"))
NAIVE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
NAIVE_ROUNDS = 2
NAIVE_PROMPT, NAIVE_ANSWER = 64, 32


@dataclass(frozen=True, slots=True)
class Naive:
    """One static batch whose requests all arrive at time 0."""

    batch: int
    duration_s: float
    latency_s: float  # mean over requests, from arrival to last token


@dataclass(frozen=True, slots=True)
class RealCell:
    """A cell on the real executor: its first `count` requests at `rate`.

    Measured over predicted step time: `steps_ratio` of the total, `step_ratio` the median over steps.
    """

    variant: str
    mix: str
    rate: float
    count: int
    figures: StudyFigures
    steps_ratio: float
    step_ratio: float


class RecordingEngine(Engine):
    """An engine that records its steps."""

    def __init__(self, config: EngineConfig, facts: ModelFacts) -> None:
        super().__init__(config, facts, reserved=RESERVED_BLOCKS)
        self.steps: list[tuple[StepPlan, float]] = []  # with seconds

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self.steps.append((plan, result.seconds))
        super().commit(plan, result, now_s)


def worker_config(model: str) -> WorkerConfig:
    """For an executor as large as the cells' engines. It transfers nothing."""
    engine = EngineConfig(kv_blocks=KV_BLOCKS, threads=THREADS)
    transfer = TransferConfig(backends=("tcp",), host="127.0.0.1")
    return WorkerConfig("study", "study", model, engine, transfer=transfer, secret="study", cpus=THREADS)


async def real_run(engine: RecordingEngine, executor: Executor, requests: Sequence[StudyRequest]) -> StudyRun:
    """Run these requests on a fresh engine at their arrival times."""
    token_s = await _serve(engine, executor, requests)
    engine.check()
    return run(requests, token_s, engine.stats().preemptions)


async def _serve(engine: Engine, executor: Executor, requests: Sequence[StudyRequest]) -> Mapping[str, Sequence[float]]:
    token_s: dict[str, list[float]] = defaultdict(list)
    unfinished = {each.request_key for each in requests}
    done = asyncio.Event()
    prepared = [(each.at_s, each.request()) for each in requests]
    begun_s = time.perf_counter()

    def now_s() -> float:
        return time.perf_counter() - begun_s

    def deliver(outputs: list[EngineOutput]) -> None:
        for each in outputs:
            assert isinstance(each, TokensOut), each
            token_s[each.key].append(now_s())
            if each.finish is not None:
                unfinished.remove(each.key)
        if not unfinished:
            done.set()

    engine_loop = EngineLoop(engine, executor, deliver, now_s)
    pumping = asyncio.ensure_future(engine_loop.run())
    for at_s, request in prepared:
        if at_s > now_s():
            await asyncio.sleep(at_s - now_s())
        engine.add(request, at_s, hold=False)
        engine_loop.wake()
    waiting = asyncio.ensure_future(done.wait())
    await asyncio.wait({pumping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    engine_loop.stop()
    await pumping
    return token_s


# ---- cells -----------------------------------------------------------------------------------------------------


async def measure_cells(executor: Executor, cost: CostModel, progress: Progress) -> tuple[RealCell, ...]:
    found = []
    for policy, mix in REAL_CELLS:
        arrivals_rate = rate(capacity(cost, mix), LOAD)
        count = max(2, round(arrivals_rate * ARRIVALS_S))
        engine = RecordingEngine(policy.config(cost), executor.facts)
        ran = await real_run(engine, executor, study_requests(mix, count, SEED, arrivals_rate))
        found.append(RealCell(policy.name, mix, arrivals_rate, count, figures([ran]), *_step_ratios(cost, engine)))
        progress(f"real: {policy.name} on {mix}")
    return tuple(found)


def _step_ratios(cost: CostModel, engine: RecordingEngine) -> tuple[float, float]:
    predicted = [plan_seconds(cost, plan) for plan, _ in engine.steps]
    measured = [seconds for _, seconds in engine.steps]
    of_steps = (one / other for one, other in zip(measured, predicted, strict=True))
    return round(sum(measured) / sum(predicted), 3), round(median(of_steps), 3)


def requests(real: RealCell) -> tuple[StudyRequest, ...]:
    return study_requests(real.mix, real.count, SEED, real.rate)


# ---- the naive sweep ---------------------------------------------------------------------------------------------


def naive_requests(batch: int) -> tuple[StudyRequest, ...]:
    return tuple(StudyRequest(f"naive-{number}", 0.0, NAIVE_PROMPT, NAIVE_ANSWER) for number in range(batch))


def naive_config(batch: int) -> EngineConfig:
    return EngineConfig(kv_blocks=KV_BLOCKS, batching="static", max_running=batch)


async def measure_naive(executor: Executor, progress: Progress) -> tuple[Naive, ...]:
    runs: dict[int, list[StudyRun]] = {batch: [] for batch in NAIVE_BATCHES}
    for number in range(NAIVE_ROUNDS):
        for batch in NAIVE_BATCHES:
            engine = RecordingEngine(naive_config(batch), executor.facts)
            runs[batch].append(await real_run(engine, executor, naive_requests(batch)))
        progress(f"naive sweep: round {number + 1} of {NAIVE_ROUNDS}")
    return tuple(_naive(batch, of_batch) for batch, of_batch in runs.items())


def _naive(batch: int, runs: Sequence[StudyRun]) -> Naive:
    """The fastest of the runs: other processes can only slow a static batch down."""
    best = min(runs, key=lambda each: each.seconds)
    latency_s = fmean(answer.token_s[-1] for answer in best.answers)
    return Naive(batch, round(best.seconds, 4), round(latency_s, 4))
