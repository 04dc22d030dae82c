"""The part `step`: time of a large decode step besides the model, and the rate of steps without a model."""

import random
from collections.abc import Mapping, Sequence

from benchmarks.engine.compare import BATCH_32, THREADS, TRIES, UNTIMED_TOKENS
from benchmarks.engine.driver_processes import Program, load_engines
from benchmarks.engine.drivers.protocol import EngineDriverConfig, Task
from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from benchmarks.hosted import MODEL
from benchmarks.timed_request import random_prompt
from cluster.offline.load.machine import allowed_cores
from cluster.offline.load.processes import ProcessFailed

ROUNDS = 5
QUICK_BATCH = 4
STEPS = 24
MAX_OVERHEAD = 0.05
MIN_RATE = 20_000.0
PARTS = {
    "schedule": "schedule",
    "inputs": "inputs built",
    "sample": "sampling",
    "commit": "commit",
    "drain": "drain",
}
REST = "threads, loop, mailbox, poll"
Samples = Sequence[Mapping[str, float]]  # results of `drivers.step` by round


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed`."""
    batch = QUICK_BATCH if quick else BATCH_32.batch
    draw = random.Random(0)
    task = Task(tuple(random_prompt(draw, BATCH_32.context - UNTIMED_TOKENS) for _ in range(batch)), STEPS)
    program = Program("step", EngineDriverConfig(MODEL, min(THREADS, len(allowed_cores()))))
    with load_engines({"step": program}, tries=1 if quick else TRIES) as loaded:
        if loaded.failed:
            raise ProcessFailed(loaded.failed["step"])
        samples = []
        for number in range(rounds):
            samples.append(loaded.ask("step", task))
            progress(f"round {number + 1} of {rounds}")
    return BenchmarkPart("step", figures(samples, batch), claims(samples, batch), NOTES)


def parts_s(sample: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one step besides the model, by part. The executor's time includes inputs and sampling."""
    parts = {title: sample[name] for name, title in PARTS.items()}
    on_loop_s = sample["schedule"] + sample["commit"] + sample["drain"]
    return parts | {REST: max(0.0, sample["step"] - sample["device"] - on_loop_s)}


def overhead(sample: Mapping[str, float]) -> float:
    """The share of a step besides the model."""
    return sum(parts_s(sample).values()) / sample["step"]


def figures(samples: Samples, batch: int) -> tuple[Figure, ...]:
    made: list[Figure] = []
    title = f"A decode step of {batch} sequences, besides the model"
    for name in parts_s(samples[0]):
        made.append(Figure(title, name, "time", "us", spread(parts_s(each)[name] for each in samples)))
        share = spread(parts_s(each)[name] / each["step"] for each in samples)
        made.append(Figure(title, name, "of the step", "%", share))
    made.append(Figure(title, "together", "time", "us", spread(sum(parts_s(each).values()) for each in samples)))
    made.append(Figure(title, "together", "of the step", "%", spread(map(overhead, samples))))
    made.append(Figure(title, "the whole step", "time", "us", spread(each["step"] for each in samples)))
    title = f"Tokens a second of {batch} sequences when the executor computes nothing"
    for name, column in (("tokens a second", "wall"), ("tokens a CPU second", "for a second of one core")):
        made.append(Figure(title, "decode", column, "1/s", spread(each[name] for each in samples)))
    return tuple(made)


def claims(samples: Samples, batch: int) -> tuple[BenchmarkClaim, ...]:
    share = spread(map(overhead, samples)).median
    rate = spread(each["tokens a CPU second"] for each in samples).median
    return (
        BenchmarkClaim(f"batch {batch}: share of a decode step besides the model", share, MAX_OVERHEAD, "%"),
        BenchmarkClaim(f"batch {batch}: tokens a core second without compute", rate, MIN_RATE, "1/s", at_least=True),
    )


NOTES = (
    "A whole worker in one process with timers around its calls. Means over the steps of a round.",
    "Without compute: the same worker with a simulated executor of zero cost, mailbox and poll included.",
)
