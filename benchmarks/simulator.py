"""CPU and memory of simulated clusters of three sizes.

Half of the workers prefill and half decode; the load per worker is the same at every size. Lengths are those of the
Azure conversation trace if DIPTYCH_SHARED names its folder, else random ones around its medians. Each sample runs in a
process of its own, so that its CPU seconds and memory are its own.
"""

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from cluster.offline.process_pool import ProcessPool
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.run import simulate
from cluster.offline.sim.systems import arrange
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.changes import at_rate, first, synthetic
from cluster.offline.workload.lengths import LengthMix, LogNormal
from cluster.offline.workload.load import load_workload
from cluster.offline.workload.processes import poisson
from workers.config import ParallelConfig

MODEL, HARDWARE, PARALLEL = "llama-2-70b", "a100-80gb", ParallelConfig(tensor=8)
TRACE = "traces/azure2023/AzureLLMInferenceTrace_conv.csv.gz"
PROMPT_TOKENS, ANSWER_TOKENS = 1020, 129  # the trace's medians
WORKER_RATE = 0.134  # requests per second and worker: the trace's 5.4 on 40 workers
SIZES = (8, 64, 512)
EACH = 8  # requests per worker
QUICK_SIZES, QUICK_EACH = (2, 4), 2
HOUR_WORKERS, HOUR_PREFILLS = 40, 25
HOUR_CPU_S = 20.0
ROUNDS = 1


@dataclass(frozen=True, slots=True)
class SimulatorCase:
    """`requests` of 0: the whole trace at its own rate."""

    name: str
    workers: int
    prefills: int
    requests: int


@dataclass(frozen=True, slots=True)
class SimulatorSample:
    """CPU seconds: `start_s` until one request was served, `run_s` of the load without the start."""

    case: SimulatorCase
    requests: int
    tokens: int
    steps: int
    start_s: float
    run_s: float
    start_bytes: int
    peak_bytes: int


def cases(sizes: Sequence[int], each: int, with_hour: bool) -> tuple[SimulatorCase, ...]:
    """Every size with the same load per worker, and the middle one with eight times as many requests."""
    grown = [SimulatorCase(f"{size} workers", size, size // 2, each * size) for size in sizes]
    middle = sizes[len(sizes) // 2]
    longer = SimulatorCase(f"{middle} workers, 8 times the requests", middle, middle // 2, 8 * each * middle)
    hour = SimulatorCase(f"the trace's hour, {HOUR_WORKERS} workers", HOUR_WORKERS, HOUR_PREFILLS, 0)
    return (*grown, longer, hour) if with_hour else (*grown, longer)


def load(case: SimulatorCase) -> Workload:
    """The requests of a case, the same every time."""
    count, rate = case.requests, WORKER_RATE * case.workers
    if (trace := _trace()) is not None:
        whole = load_workload(str(trace))
        return at_rate(first(whole, count), rate) if count else whole
    lengths = LengthMix(((LogNormal(PROMPT_TOKENS, 0.8, 2, 8192), LogNormal(ANSWER_TOKENS, 1.0, 1, 1000)),))
    return synthetic("random around the trace's medians", poisson(rate), lengths, key="bench", seed=0, count=count)


def _trace() -> Path | None:
    path = Path(os.environ.get("DIPTYCH_SHARED", "no-folder-named")) / TRACE
    return path if path.exists() else None


def sample(case: SimulatorCase) -> SimulatorSample:
    """Simulate one request, then the case, in this process."""
    model = pool_model(MODEL, HARDWARE, PARALLEL)
    models: Mapping[str, PoolModel] = {"prefill": model, "decode": model}
    spec = arrange("distserve", fleet(MODEL, HARDWARE, PARALLEL, case.workers), case.prefills)
    whole = load(case)
    begun_s = time.process_time()
    simulate(spec, models, replace(whole, arrivals=whole.arrivals[:1]))
    start_s, start_bytes = time.process_time() - begun_s, _peak_bytes()
    run = simulate(spec, models, whole)
    return SimulatorSample(
        case,
        len(run.served),
        sum(len(each.token_s) for each in run.served),
        sum(each.steps for each in run.workers),
        start_s,
        max(time.process_time() - begun_s - 2 * start_s, 1e-9),
        start_bytes,
        _peak_bytes(),
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


READINGS: Mapping[str, tuple[str, Callable[[SimulatorSample], float]]] = {
    "Requests": ("n", lambda each: each.requests),
    "Requests per CPU second": ("1/s", lambda each: each.requests / each.run_s),
    "CPU per token": ("us", lambda each: each.run_s / each.tokens),
    "CPU per step": ("us", lambda each: each.run_s / each.steps),
    "CPU of the load": ("s", lambda each: each.run_s),
    "CPU to start": ("s", lambda each: each.start_s),
    "Memory after the start": ("MiB", lambda each: each.start_bytes),
    "Peak memory": ("MiB", lambda each: each.peak_bytes),
}


def figures(samples: Sequence[SimulatorSample]) -> tuple[Figure, ...]:
    """A row for each case, a column for each reading."""
    by_case: dict[SimulatorCase, list[SimulatorSample]] = {}
    for each in samples:
        by_case.setdefault(each.case, []).append(each)
    return tuple(
        Figure("Simulated clusters", case.name, column, unit, spread(read(each) for each in group))
        for case, group in by_case.items()
        for column, (unit, read) in READINGS.items()
    )


def claims(samples: Sequence[SimulatorSample]) -> tuple[BenchmarkClaim, ...]:
    """The hour of the trace should take at most 20 s of CPU."""
    hours = [each for each in samples if not each.case.requests]
    return tuple(
        BenchmarkClaim(f"CPU of {each.case.name}", each.start_s + each.run_s, HOUR_CPU_S, "s") for each in hours[:1]
    )


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Each case in a fresh process."""
    sizes, each = (QUICK_SIZES, QUICK_EACH) if quick else (SIZES, EACH)
    has_trace = _trace() is not None
    wanted = [case for _ in range(rounds) for case in cases(sizes, each, has_trace and not quick)]
    taken: list[SimulatorSample] = []
    for case in wanted:
        with ProcessPool(1) as fresh:
            taken += fresh.map(sample, [case])
        progress(f"{case.name}: {taken[-1].run_s:.1f} s of CPU for {taken[-1].requests} requests")
    note = (
        f"Lengths of {TRACE}." if has_trace else "Random lengths around the trace's medians: DIPTYCH_SHARED is not set."
    )
    return BenchmarkPart("simulator", figures(taken), claims(taken), (note,))
