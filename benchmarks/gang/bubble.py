"""The part `gang-bubble`: the share of time that pipeline stages idle, in prefill and in decode.

Real stages, at most one per core, and simulated stages, which only sleep.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from benchmarks.gang.driver import GangWorkerConfig
from benchmarks.gang.plan_times import bubble_share, equal_parts_bubble
from benchmarks.gang.worker_process import WorkerProcess, worker_process
from benchmarks.hosted import MODEL
from cluster.offline.load.machine import allowed_cores
from cluster.offline.load.processes import ProcessFailed

ROUNDS = 3
COUNTS = (1, 4, 16)
QUICK_COUNTS = (1, 4)
STAGES = (2, 3)
PROMPT_TOKENS = 128
STEPS, QUICK_STEPS = 8, 3
MOST_ABOVE_FILL = 0.10

PROMPTS, FILL, ANSWERS = "prompts", "prompts, fill and drain alone", "answers"
# (worker, stages, count) -> shares by round for each of PROMPTS, FILL and ANSWERS
Samples = Mapping[tuple[str, int, int], Mapping[str, Sequence[float]]]


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Real stages that do not start are left out with a note. Raises `ProcessFailed` if simulated ones fail."""
    counts, steps = (QUICK_COUNTS, QUICK_STEPS) if quick else (COUNTS, STEPS)
    samples: dict[tuple[str, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    left_out = []
    with ExitStack() as stack:
        workers: dict[tuple[str, int], WorkerProcess] = {}
        for stages in STAGES:
            workers["simulated", stages] = stack.enter_context(
                worker_process(GangWorkerConfig(MODEL, 1, stages, 1, "simulated"))
            )
            if quick or stages > len(allowed_cores()):
                continue
            try:
                workers["real", stages] = stack.enter_context(worker_process(GangWorkerConfig(MODEL, 1, stages, 1)))
            except ProcessFailed as error:
                left_out.append(f"{stages} real stages were left out: {error}")
        for number in range(rounds):
            for (kind, stages), worker in workers.items():
                for count in counts:
                    for name, share in _shares(worker, stages, count, steps).items():
                        samples[kind, stages, count][name].append(share)
            progress(f"round {number + 1} of {rounds}")
    return BenchmarkPart("gang-bubble", figures(samples), claims(samples), (*NOTES, *left_out))


def _shares(worker: WorkerProcess, stages: int, count: int, steps: int) -> dict[str, float]:
    plans = worker.run("prompts", count, PROMPT_TOKENS)
    answers = worker.run("answers", count, PROMPT_TOKENS, steps)
    return {
        PROMPTS: bubble_share(plans, stages),
        FILL: equal_parts_bubble(len(plans), stages),
        ANSWERS: bubble_share(answers[1:], stages, since_s=answers[0].ended_s),
    }


def figures(samples: Samples) -> tuple[Figure, ...]:
    return tuple(
        Figure(f"Bubble of {stages} {kind} stages", f"{count} at once", name, "%", spread(shares))
        for (kind, stages, count), named in samples.items()
        for name, shares in named.items()
    )


def claims(samples: Samples) -> tuple[BenchmarkClaim, ...]:
    """The schedule adds little to the cost of filling and draining the stages."""
    return tuple(
        BenchmarkClaim(
            f"{count} prompts on {stages} {kind} stages: bubble beyond fill and drain",
            max(0.0, spread(named[PROMPTS]).median - spread(named[FILL]).median),
            MOST_ABOVE_FILL,
            "%",
        )
        for (kind, stages, count), named in samples.items()
    )


NOTES = (
    f"Prompts of {PROMPT_TOKENS} tokens that arrive together, up to their first tokens; answers while all decode.",
    "Fill and drain alone: the bubble of as many plans of equal cost on every stage (GPipe).",
    "A sequence's next token depends on its last one, so a single answer leaves all stages but one idle.",
)
