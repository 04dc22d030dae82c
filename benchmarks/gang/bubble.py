"""The part `gang-bubble`: which share of its stages' time a pipeline idles, for prompts and for answers.

Real stages, as many as there are cores, and modelled ones, which compute on a core of their own and only wait.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.figures import Claim, Figure, Part, Progress, spread
from benchmarks.gang.driver import Order
from benchmarks.gang.loaded import Loaded, loaded
from benchmarks.gang.recorded import bubble_share, equal_parts_bubble
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
# (worker, stages, count) -> for each of PROMPTS, FILL and ANSWERS the rounds' shares
Samples = Mapping[tuple[str, int, int], Mapping[str, Sequence[float]]]


def measure(rounds: int, quick: bool, progress: Progress) -> Part:
    """Real stages that do not start are left out and noted. Raises `ProcessFailed` when modelled ones do not."""
    counts, steps = (QUICK_COUNTS, QUICK_STEPS) if quick else (COUNTS, STEPS)
    samples: dict[tuple[str, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    left_out = []
    with ExitStack() as stack:
        workers: dict[tuple[str, int], Loaded] = {}
        for stages in STAGES:
            workers["modelled", stages] = stack.enter_context(loaded(Order(MODEL, 1, stages, 1, "modelled")))
            if quick or stages > len(allowed_cores()):
                continue
            try:
                workers["real", stages] = stack.enter_context(loaded(Order(MODEL, 1, stages, 1)))
            except ProcessFailed as error:
                left_out.append(f"{stages} real stages were left out: {error}")
        for number in range(rounds):
            for (kind, stages), worker in workers.items():
                for count in counts:
                    for name, share in _shares(worker, stages, count, steps).items():
                        samples[kind, stages, count][name].append(share)
            progress(f"round {number + 1} of {rounds}")
    return Part("gang-bubble", figures(samples), claims(samples), (*NOTES, *left_out))


def _shares(worker: Loaded, stages: int, count: int, steps: int) -> dict[str, float]:
    plans = worker.ask("prompts", count, PROMPT_TOKENS)
    answers = worker.ask("answers", count, PROMPT_TOKENS, steps)
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


def claims(samples: Samples) -> tuple[Claim, ...]:
    """The schedule adds little to what filling and draining the stages costs."""
    return tuple(
        Claim(
            f"{count} prompts on {stages} {kind} stages: bubble beyond fill and drain",
            max(0.0, spread(named[PROMPTS]).median - spread(named[FILL]).median),
            MOST_ABOVE_FILL,
            "%",
        )
        for (kind, stages, count), named in samples.items()
    )


NOTES = (
    f"Prompts of {PROMPT_TOKENS} tokens that come all at once, to their first tokens; answers while all decode.",
    "Fill and drain alone: the bubble of as many plans if each cost every stage the same (GPipe).",
    "A sequence's next token needs its last, so one answer alone leaves all stages but one idle.",
)
