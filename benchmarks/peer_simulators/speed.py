"""Requests per CPU second of other simulators and of Diptych's, on the same part of a trace, workers and step times.

The load is the first requests of the Azure conversation trace at their own times (DIPTYCH_SHARED names its folder) on
40 workers of eight A100: 25 for prefill and 15 for decode where the peer splits, else 40 mixed ones. CPU seconds are of
the simulated load without the start, each side in a process of its own; TTFT and TPOT show that both did like work.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from benchmarks.peer_simulators.process import PeerSource, started
from benchmarks.peer_simulators.sources import DISTSERVE, SPLITWISE, VIDUR
from benchmarks.simulator import TRACE
from cluster.offline.sim.fleet import MAX_RUNNING, fleet, pool_model
from cluster.offline.sim.run import simulate
from cluster.offline.sim.systems import arrange
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.changes import first
from cluster.offline.workload.load import load_workload
from workers.config import ParallelConfig
from workers.costs import CostModel

GPU, TENSOR = "a100-80gb", 8
WORKERS, PREFILLS = 40, 25
REQUESTS, QUICK_REQUESTS = 2000, 100
ROUNDS = 1
LLAMA, OPT = "llama-2-70b", "opt-66b"
MAX_TOKENS, CONTEXT_STEP, CHUNK_STEP, CHUNK = 16384, 256, 32, 512


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """`system`: ours, as `diptych simulate --compare` names it; `costs`: the source of both sides' step times."""

    name: str
    source: PeerSource
    system: str
    model: str
    costs: str
    prefills: int
    models: str

    @property
    def ours(self) -> str:
        return f"Diptych, {self.system}, for {self.name}"


CASES = (
    *(
        SpeedCase(
            f"Vidur, {name}",
            VIDUR,
            name,
            LLAMA,
            "vidur",
            0,
            "Vidur: whole steps of own models of vLLM's and Sarathi's schedulers, KV blocks, preemption, round "
            "robin; no prefix cache by content, transfers, failures, deadlines or admission.",
        )
        for name in ("sarathi", "vllm")
    ),
    SpeedCase(
        "SplitwiseSim",
        SPLITWISE,
        "splitwise",
        LLAMA,
        "splitwise",
        PREFILLS,
        "SplitwiseSim: equal decode steps at once, own queues of prompt and token machines that mix under load, "
        "memory, preemption, KV transfers as a delay without contention; steps by the batch's tokens alone; no prefix "
        "cache, failures, deadlines or admission.",
    ),
    SpeedCase(
        "DistServe's simulator",
        DISTSERVE,
        "distserve",
        OPT,
        "distserve",
        PREFILLS,
        "DistServe's simulator: whole steps of own first-come-first-served prefill and decode workers, shortest queue; "
        "KV is handed over at once, without limit; no prefix cache, failures, deadlines or admission.",
    ),
)


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """CPU seconds of the load; TTFT and TPOT in seconds of the requests that have them."""

    cpu_s: float
    ttft_s: Sequence[float] = field(repr=False)
    tpot_s: Sequence[float] = field(repr=False)


def load(count: int) -> Workload | None:
    """The first requests of the trace; None: it is not there."""
    path = Path(os.environ.get("DIPTYCH_SHARED", "no-folder-named")) / TRACE
    return first(load_workload(str(path)), count) if path.exists() else None


def our_sample(case: SpeedCase, count: int) -> SpeedSample:
    """In this process."""
    whole = load(count)
    assert whole is not None, "the caller saw the trace"
    parallel = ParallelConfig(tensor=TENSOR)
    model = pool_model(case.model, GPU, parallel, source=case.costs)
    spec = arrange(case.system, fleet(case.model, GPU, parallel, WORKERS), case.prefills)
    models = {pool.name: model for pool in spec.pools}
    begun_s = time.process_time()
    simulate(spec, models, replace(whole, arrivals=whole.arrivals[:1]))
    start_s = time.process_time() - begun_s
    run = simulate(spec, models, whole)
    cpu_s = time.process_time() - begun_s - 2 * start_s
    ttft_s = [each.ttft_s for each in run.served if each.ttft_s is not None]
    return SpeedSample(cpu_s, ttft_s, [each.tpot_s for each in run.served if each.tpot_s is not None])


def job(case: SpeedCase, workload: Workload) -> dict[str, Any]:
    """What the peer's script wants."""
    requests = [(each.at_s, each.prompt_tokens, each.output_tokens) for each in workload.arrivals]
    if case.source is SPLITWISE:
        return {"prompts": case.prefills, "tokens": WORKERS - case.prefills, "requests": requests}
    if case.source is DISTSERVE:
        groups = [[case.prefills, TENSOR], [WORKERS - case.prefills, TENSOR]]
        return {"engine": "distserve", "model": f"facebook/{case.model}", "groups": groups, "requests": requests}
    parallel = ParallelConfig(tensor=TENSOR)
    return {
        "scheduler": case.system,
        "replicas": WORKERS,
        "tensor": TENSOR,
        "kv_blocks": fleet(case.model, GPU, parallel, WORKERS).engine.kv_blocks,
        "max_tokens": MAX_TOKENS,
        "max_batch": MAX_RUNNING,
        "chunk": CHUNK,
        "requests": requests,
        "costs": vidur_costs(pool_model(case.model, GPU, parallel, source=case.costs).cost),
    }


def vidur_costs(cost: CostModel) -> dict[str, Any]:
    """Ms of steps in the parts that Vidur adds up: all but attention, and the attention of decodes and of chunks."""
    tokens = [cost.decode_seconds(number, 0) for number in range(1, MAX_TOKENS + 1)]
    contexts = range(0, MAX_TOKENS + 1, CONTEXT_STEP)
    decode = [
        (batch, context, 1e3 * (cost.decode_seconds(batch, batch * context) - tokens[batch - 1]))
        for batch in range(1, MAX_RUNNING + 1)
        for context in contexts
    ]
    prefill = [
        (context, chunk, 1e3 * (cost.prefill_seconds(chunk, max(0, context - chunk)) - tokens[chunk - 1]))
        for context in contexts
        for chunk in range(CHUNK_STEP, max(CHUNK_STEP, context) + 1, CHUNK_STEP)
    ]
    return {"tokens": [1e3 * each for each in tokens], "decode": decode, "prefill": prefill}


READINGS: Mapping[str, tuple[str, Callable[[SpeedSample], float]]] = {
    "Requests": ("n", lambda each: len(each.ttft_s)),
    "CPU": ("s", lambda each: each.cpu_s),
    "Requests per CPU second": ("1/s", lambda each: len(each.ttft_s) / each.cpu_s),
    "TTFT p50": ("ms", lambda each: float(np.percentile(each.ttft_s, 50))),
    "TTFT p90": ("ms", lambda each: float(np.percentile(each.ttft_s, 90))),
    "TPOT p50": ("ms", lambda each: float(np.percentile(each.tpot_s, 50))),
    "TPOT p90": ("ms", lambda each: float(np.percentile(each.tpot_s, 90))),
}


def figures(samples: Mapping[str, Sequence[SpeedSample]]) -> tuple[Figure, ...]:
    """A row for each side of a case, a column for each reading."""
    return tuple(
        Figure("Simulators", row, column, unit, spread(read(each) for each in taken))
        for row, taken in samples.items()
        for column, (unit, read) in READINGS.items()
    )


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Skipped without the trace or any peer. Raises `PeerFailed`."""
    count = QUICK_REQUESTS if quick else REQUESTS
    if (workload := load(count)) is None:
        return BenchmarkPart("peer-simulators", skipped=f"no {TRACE} in the folder that DIPTYCH_SHARED names")
    missing = tuple(dict.fromkeys(reason for case in CASES if (reason := case.source.missing())))
    present = [case for case in CASES if not case.source.missing()]
    if not present:
        return BenchmarkPart("peer-simulators", skipped="; ".join(missing))
    samples: dict[str, list[SpeedSample]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as fresh:
        for case in (each for _ in range(rounds) for each in present):
            with started(case.source) as peer:
                answer = peer(job(case, workload))
            theirs = SpeedSample(answer["cpu_s"], answer["ttft_s"], answer["tpot_s"])
            ours = fresh.submit(our_sample, case, count).result()
            samples.setdefault(case.name, []).append(theirs)
            samples.setdefault(case.ours, []).append(ours)
            progress(f"{case.name}: {theirs.cpu_s:.1f} s of CPU, Diptych {ours.cpu_s:.1f} s")
    return BenchmarkPart(
        "peer-simulators", figures(samples), notes=(*dict.fromkeys(case.models for case in present), *missing)
    )
