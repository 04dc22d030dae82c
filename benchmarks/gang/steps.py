"""The part `gang-step`: the cost of a step with several ranks besides the model, and the time that ranks wait.

Ranks that compute nothing, beside a single such rank; and two real ranks with a thread each, beside one rank with one
thread and with two.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.gang.driver import GangWorkerConfig
from benchmarks.gang.plan_times import PlanTime
from benchmarks.gang.plans import PROMPT
from benchmarks.gang.worker_process import worker_process
from benchmarks.hosted import MODEL

ROUNDS = 3
STEPS, QUICK_STEPS = 100, 5  # of ranks that compute nothing
DECODES, PREFILLS = 12, 2  # of real ones
EMPTY = ((1, 1), (2, 1), (1, 2), (2, 2))  # (tensor, pipeline)
EMPTY_PLANS = ("decode of 1", "decode of 32", PROMPT)
REAL_PLANS = ("decode of 1", "decode of 16", PROMPT)
ALONE, BOTH_CORES, SHARED, PIPELINE = (
    "1 rank, 1 thread",
    "1 rank, 2 threads",
    "2x1, a thread each",
    "1x2, a thread each",
)
REAL = {
    ALONE: GangWorkerConfig(MODEL, 1, 1, 1),
    BOTH_CORES: GangWorkerConfig(MODEL, 1, 1, 2),
    SHARED: GangWorkerConfig(MODEL, 2, 1, 1),
    PIPELINE: GangWorkerConfig(MODEL, 1, 2, 1),
}
MOST_OF_A_STEP = 0.05
EmptySamples = Mapping[tuple[str, str], Sequence[float]]  # (worker, plan) -> seconds of a step, by round
RealSamples = Mapping[tuple[str, str], Sequence[tuple[float, float, float]]]  # -> (seconds, comm share, wait share)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed`."""
    empty = _measure_empty(rounds, QUICK_STEPS if quick else STEPS, progress)
    real = {} if quick else _measure_real(rounds, progress)
    return BenchmarkPart("gang-step", figures(empty, real), claims(empty, real), NOTES)


def _measure_empty(rounds: int, steps: int, progress: Progress) -> EmptySamples:
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for tensor, pipeline in EMPTY:  # one after another: not all ranks fit into memory at once
        with worker_process(GangWorkerConfig(MODEL, tensor, pipeline, 1, "nothing")) as worker:
            for _ in range(rounds):
                for plan in EMPTY_PLANS:
                    taken = worker.run("plan", plan, steps)
                    samples[f"{tensor}x{pipeline}", plan].append(_seconds(taken))
        progress(f"{tensor}x{pipeline} without compute")
    return samples


def _measure_real(rounds: int, progress: Progress) -> RealSamples:
    samples: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker_process(config)) for name, config in REAL.items()}
        for number in range(rounds):
            for name, worker in workers.items():
                for plan in REAL_PLANS:
                    taken = worker.run("plan", plan, PREFILLS if plan == PROMPT else DECODES)
                    samples[name, plan].append((_seconds(taken), *_shares(taken)))
            progress(f"round {number + 1} of {rounds}")
    return samples


def _seconds(plans: Sequence[PlanTime]) -> float:
    return median(plan.ended_s - plan.begun_s for plan in plans)


def _shares(plans: Sequence[PlanTime]) -> tuple[float, float]:
    """Shares of the ranks' time: in collectives, and waiting for the previous stage."""
    ranks = [rank for plan in plans for rank in plan.ranks]
    whole_s = sum(rank.seconds for rank in ranks)
    return sum(rank.comm_s for rank in ranks) / whole_s, sum(rank.wait_s for rank in ranks) / whole_s


NOTHING = "A step of ranks that compute nothing"
STEP, COMM = "A step of real ranks", "All-reduces, as a share of the ranks' time in a step"
WAIT = "Waiting for the previous stage, as a share of the ranks' time, one plan at a time"


def figures(empty: EmptySamples, real: RealSamples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for (name, plan), taken_s in empty.items():
        made.append(Figure(NOTHING, name, plan, "us", spread(taken_s)))
        made.append(Figure(f"{NOTHING}, beside one rank", name, plan, "x", ratios(taken_s, empty["1x1", plan])))
    for (name, plan), taken in real.items():
        made.append(Figure(STEP, name, plan, "ms", spread(seconds for seconds, _, _ in taken)))
        alone = [seconds for seconds, _, _ in real[BOTH_CORES, plan]]
        made.append(Figure(f"{STEP}, beside {BOTH_CORES}", name, plan, "x", ratios([each[0] for each in taken], alone)))
    for title, worker, share in ((COMM, SHARED, 1), (WAIT, PIPELINE, 2)):
        made += [
            Figure(title, worker, plan, "%", spread(each[share] for each in taken))
            for (name, plan), taken in real.items()
            if name == worker
        ]
    return tuple(made)


def claims(empty: EmptySamples, real: RealSamples) -> tuple[BenchmarkClaim, ...]:
    """The time that a second rank adds to a step, as a share of the same step of a real model."""
    if not real:
        return ()
    plan = "decode of 1"
    added_s = spread(empty["2x1", plan]).median - spread(empty["1x1", plan]).median
    step_s = spread(seconds for seconds, _, _ in real[BOTH_CORES, plan]).median
    what = f"what a gang of 2 adds to a {plan} without compute: share of a step of {MODEL} ({step_s * 1e3:.0f} ms)"
    return (BenchmarkClaim(what, max(0.0, added_s) / step_s, MOST_OF_A_STEP, "%"),)


NOTES = (
    "Plans go directly to the executor, one at a time; times are measured on the leader's event loop.",
    "Each rank is a process of this machine; gangs of more ranks than cores take turns on them.",
    "All workers are loaded at once and measured in turns; idle ones use a few hundredths of a core.",
)
