"""The part `gang-step`: what a step costs besides the model when several ranks share it, and what they wait for.

Ranks that compute nothing, beside one such rank alone; and two real ranks with a thread each, beside one rank with one
thread and with two.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median

from benchmarks.figures import Claim, Figure, Part, Progress, ratios, spread
from benchmarks.gang.driver import Order
from benchmarks.gang.loaded import loaded
from benchmarks.gang.plans import PROMPT
from benchmarks.gang.recorded import Executed
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
    ALONE: Order(MODEL, 1, 1, 1),
    BOTH_CORES: Order(MODEL, 1, 1, 2),
    SHARED: Order(MODEL, 2, 1, 1),
    PIPELINE: Order(MODEL, 1, 2, 1),
}
MOST_OF_A_STEP = 0.05
EmptySamples = Mapping[tuple[str, str], Sequence[float]]  # (worker, plan) -> seconds of a step, by round
RealSamples = Mapping[tuple[str, str], Sequence[tuple[float, float, float]]]  # -> (seconds, comm share, wait share)


def measure(rounds: int, quick: bool, progress: Progress) -> Part:
    """Raises `ProcessFailed`."""
    empty = _empty(rounds, QUICK_STEPS if quick else STEPS, progress)
    real = {} if quick else _real(rounds, progress)
    return Part("gang-step", figures(empty, real), claims(empty, real), NOTES)


def _empty(rounds: int, steps: int, progress: Progress) -> EmptySamples:
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for tensor, pipeline in EMPTY:  # one after another: their ranks would not fit beside each other
        with loaded(Order(MODEL, tensor, pipeline, 1, "nothing")) as worker:
            for _ in range(rounds):
                for plan in EMPTY_PLANS:
                    taken = worker.ask("plan", plan, steps)
                    samples[f"{tensor}x{pipeline}", plan].append(_seconds(taken))
        progress(f"{tensor}x{pipeline} without compute")
    return samples


def _real(rounds: int, progress: Progress) -> RealSamples:
    samples: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(loaded(order)) for name, order in REAL.items()}
        for number in range(rounds):
            for name, worker in workers.items():
                for plan in REAL_PLANS:
                    taken = worker.ask("plan", plan, PREFILLS if plan == PROMPT else DECODES)
                    samples[name, plan].append((_seconds(taken), *_shares(taken)))
            progress(f"round {number + 1} of {rounds}")
    return samples


def _seconds(plans: Sequence[Executed]) -> float:
    return median(plan.ended_s - plan.begun_s for plan in plans)


def _shares(plans: Sequence[Executed]) -> tuple[float, float]:
    """Of the ranks' own time with the plans: in collectives, and waiting for the stage before."""
    ranks = [rank for plan in plans for rank in plan.ranks]
    whole_s = sum(rank.seconds for rank in ranks)
    return sum(rank.comm_s for rank in ranks) / whole_s, sum(rank.wait_s for rank in ranks) / whole_s


NOTHING = "A step of ranks that compute nothing"
STEP, COMM = "A step of real ranks", "All-reduces, as a share of the ranks' time in a step"
WAIT = "Waiting for the stage before, as a share of the ranks' time, one plan at a time"


def figures(empty: EmptySamples, real: RealSamples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for (name, plan), taken_s in empty.items():
        made.append(Figure(NOTHING, name, plan, "us", spread(taken_s)))
        made.append(Figure(f"{NOTHING}, beside one rank", name, plan, "x", ratios(taken_s, empty["1x1", plan])))
    for (name, plan), taken in real.items():
        made.append(Figure(STEP, name, plan, "ms", spread(seconds for seconds, _, _ in taken)))
        alone = [seconds for seconds, _, _ in real[BOTH_CORES, plan]]
        made.append(Figure(f"{STEP}, beside {BOTH_CORES}", name, plan, "x", ratios([each[0] for each in taken], alone)))
    for title, order, share in ((COMM, SHARED, 1), (WAIT, PIPELINE, 2)):
        made += [
            Figure(title, order, plan, "%", spread(each[share] for each in taken))
            for (name, plan), taken in real.items()
            if name == order
        ]
    return tuple(made)


def claims(empty: EmptySamples, real: RealSamples) -> tuple[Claim, ...]:
    """What a second rank adds to a step, beside the same step of a real model."""
    if not real:
        return ()
    plan = "decode of 1"
    added_s = spread(empty["2x1", plan]).median - spread(empty["1x1", plan]).median
    step_s = spread(seconds for seconds, _, _ in real[BOTH_CORES, plan]).median
    what = f"what a gang of 2 adds to a {plan} without compute: share of a step of {MODEL} ({step_s * 1e3:.0f} ms)"
    return (Claim(what, max(0.0, added_s) / step_s, MOST_OF_A_STEP, "%"),)


NOTES = (
    "Plans go straight to the executor, one at a time; times are taken on the leader's event loop.",
    "Each rank is a process of this machine; gangs of more ranks than cores take turns on them.",
    "All workers are loaded at once and asked in turns; those that wait use a few hundredths of a core.",
)
