"""The part `engine`: tokens a second of prefill and decode, ours beside the peers' and beside the machine's limits.

    round:  limits, then every contender in turn, all others standing still; the next round in the opposite order

Every prompt is the same for all of a round. A prefill is timed to its first token; of a decode's steps the median
counts. Both clocks: wall, and CPU time of all threads of the process.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from benchmarks.asking import fresh_prompt
from benchmarks.engine.contenders import DETERMINISTIC, LLAMA_ROWS, OURS, VLLM_ROW, Contender, contenders
from benchmarks.engine.driven import DISTURBED, Program, Stage, stage
from benchmarks.engine.drivers.lines import Order, Task
from benchmarks.engine.limits import Column, Shape, most_tokens
from benchmarks.environments import LLAMA, VLLM
from benchmarks.figures import Claim, Figure, Part, Progress, Spread, ratios, spread
from benchmarks.hosted import model_folder
from cluster.offline.load.machine import allowed_cores
from cluster.offline.load.processes import ProcessFailed

ROUNDS = 5
THREADS = 2
TRIES = 3
BEHIND = 10  # a decode's prompts are that much shorter than its context is while it is timed
PREFILL = Column("prefill 1,024", 0, 1024)
DECODES = (
    Column("decode, batch 1", 1, 250, 24),
    Column("batch 4", 4, 250, 16),
    Column("batch 16", 16, 250, 12),
    Column("batch 32", 32, 250, 8),
)
COLUMNS = (PREFILL, *DECODES)
QUICK_COLUMNS = (Column("prefill 128", 0, 128), Column("decode, batch 1", 1, 50, 6), Column("batch 4", 4, 50, 4))
BATCH_1, BATCH_16, BATCH_32 = DECODES[0], DECODES[2], DECODES[3]
LIMITS = "limits"

WALL = "Tokens a second"
CPU = "Tokens for a second of CPU time, user and system of all threads"
MACHINE = "What this machine allows"
ALLOWED = "Most tokens a second that the machine allows, by the format of weights"
SHARE = "Share of that limit"
AGAINST = f"{OURS} / peer"
COST = "Deterministic / not"
Laps = Sequence[tuple[float, float]]  # (wall_s, cpu_s) of a step
Samples = Mapping[tuple[str, str], Sequence[tuple[float, float]]]  # contender, column -> of each round, the step
Measured = Sequence[Mapping[str, float]]  # of each round, what `drivers.limits` found


def measure(rounds: int, quick: bool, progress: Progress) -> Part:
    """A contender that is not there, does not load or cannot compute is left out and noted. Raises `ProcessFailed`."""
    threads = min(THREADS, len(allowed_cores()))
    found, left_out = contenders(threads, quick)
    columns = QUICK_COLUMNS if quick else COLUMNS
    progress(f"loading {', '.join(each.name for each in found)}")
    programs = {each.name: each.program for each in found} | {LIMITS: Program(LIMITS, Order("", threads))}
    with stage(programs, tries=1 if quick else TRIES) as loaded:
        failed = dict(loaded.failed) | _warm(loaded, columns[0].context)
        left_out += tuple(f"{name} was left out: {why}" for name, why in failed.items())
        present = [each for each in found if each.name not in failed]
        samples, measured = _rounds(loaded, [each.name for each in present], columns, rounds, progress)
    notes = (f"{threads} threads each.", *NOTES, _quiet(loaded), _versions(present), *left_out)
    return Part("engine", figures(samples, measured, present, columns, shape()), claims(samples, present), notes)


def _warm(loaded: Stage, length: int) -> dict[str, str]:
    """The first prompt pays for all. Who cannot compute it, with why."""
    failed = {}
    for name in loaded.names:
        try:
            loaded.ask(name, Task((fresh_prompt(random.Random(1), length),)))
        except ProcessFailed as error:
            failed[name] = str(error)
    return failed


def _rounds(
    loaded: Stage, names: Sequence[str], columns: Sequence[Column], rounds: int, progress: Progress
) -> tuple[Samples, Measured]:
    draw = random.Random(0)
    largest = columns[-1]
    contexts = tuple(fresh_prompt(draw, largest.context - BEHIND) for _ in range(largest.batch))
    samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    measured = []
    for number in range(rounds):
        measured.append(loaded.ask(LIMITS, Task(())))
        prompt = fresh_prompt(draw, columns[0].context)
        for name in names if number % 2 == 0 else reversed(names):
            for column in columns:
                prompts = contexts[: column.batch] or (prompt,)
                laps: Laps = loaded.ask(name, Task(prompts, column.steps))
                samples[name, column.name].append(_step(laps))
            progress(f"round {number + 1} of {rounds}: {name}")
    return samples, measured


def _step(laps: Laps) -> tuple[float, float]:
    """The median step on each clock."""
    return median(wall_s for wall_s, _ in laps), median(cpu_s for _, cpu_s in laps)


def shape() -> Shape:
    """Of the measured model."""
    from workers.model.folder import ModelFolder, count_parameters

    folder = model_folder()
    config = json.loads((folder / "config.json").read_text())
    return Shape.of(config, count_parameters(ModelFolder(folder.name, folder)))


def figures(
    samples: Samples, measured: Measured, present: Sequence[Contender], columns: Sequence[Column], shape: Shape
) -> tuple[Figure, ...]:
    rates = {
        (each.name, column.name, clock): [column.tokens / step[clock] for step in samples[each.name, column.name]]
        for each in present
        for column in columns
        for clock in (0, 1)
    }
    allowed = {
        (weights, column.name): [most_tokens(shape, column, weights, found) for found in measured]
        for weights in dict.fromkeys(each.weights for each in present)
        for column in columns
    }
    made = [
        Figure(title, each.name, column.name, "tok/s", spread(rates[each.name, column.name, clock]))
        for clock, title in enumerate((WALL, CPU))
        for each in present
        for column in columns
    ]
    made += [
        Figure(MACHINE, _spoken(name), "best", "GB/s" if name.startswith("read ") else "GFLOP/s", spread(of_rounds))
        for name, of_rounds in ((name, [found[name] for found in measured]) for name in measured[0])
    ]
    made += [
        Figure(ALLOWED, weights, column, "tok/s", spread(of_rounds)) for (weights, column), of_rounds in allowed.items()
    ]
    made += [
        Figure(
            SHARE,
            each.name,
            column.name,
            "%",
            ratios(rates[each.name, column.name, 0], allowed[each.weights, column.name]),
        )
        for each in present
        for column in columns
    ]
    names = {each.name for each in present}
    peers = [each.name for each in present if not each.ours]
    for title, ours, others in ((AGAINST, OURS, peers), (COST, DETERMINISTIC, [OURS])):
        made += [
            Figure(title, other, column.name, "x", _compared(samples, ours, other, column.name))
            for other in others
            for column in columns
            if {ours, other} <= names
        ]
    return tuple(made)


def _spoken(limit: str) -> str:
    """A limit's name for people: "read 2", "float32 1024x576x1536"."""
    kind, _, size = limit.partition(" ")
    if kind == "read":
        return f"memory read, {size} thread{'s' if size != '1' else ''}"
    return f"matrix product, {kind} {size.replace('x', ' x ')}"


def _compared(samples: Samples, ours: str, other: str, column: str) -> Spread:
    """Speed of ours over the other's, round by round: the inverse of their times."""
    theirs_s, ours_s = ([wall_s for wall_s, _ in samples[name, column]] for name in (other, ours))
    return ratios(theirs_s, ours_s)


def claims(samples: Samples, present: Sequence[Contender]) -> tuple[Claim, ...]:
    """Those whose two sides were measured; medians of the ratios of each round."""
    return tuple(
        Claim(f"{column}: {ours} / {other}", _compared(samples, ours, other, column).median, bound, "x", at_least=True)
        for column, ours, other, bound in _aims(samples, present)
        if (ours, column) in samples and (other, column) in samples
    )


def _aims(samples: Samples, present: Sequence[Contender]) -> Iterator[tuple[str, str, str, float]]:
    """(column, ours, the other, at least)."""
    for column in COLUMNS:
        yield column.name, OURS, VLLM_ROW, 1.1
    yield BATCH_1.name, OURS, LLAMA_ROWS["F32"], 0.9
    opt_in = [each.name for each in present if each.opt_in]
    peers = [each.name for each in present if not each.ours]
    if opt_in:
        yield BATCH_1.name, _fastest(samples, opt_in, BATCH_1.name), LLAMA_ROWS["Q4_1"], 1.0
    for column in (BATCH_16, BATCH_32):
        if opt_in and peers and (peers[0], column.name) in samples:
            yield column.name, _fastest(samples, opt_in, column.name), _fastest(samples, peers, column.name), 1.5


def _fastest(samples: Samples, names: Sequence[str], column: str) -> str:
    return min(names, key=lambda name: median(wall_s for wall_s, _ in samples[name, column]))


def _quiet(loaded: Stage) -> str:
    again = (
        f"{loaded.asked_again} times somebody was asked again because others took over {DISTURBED:.0%} of the machine"
    )
    return f"{loaded.asked} times one was asked; {again}; {loaded.disturbed} answers stayed disturbed."


def _versions(present: Sequence[Contender]) -> str:
    drivers = {each.program.driver for each in present}
    told = [peer.versions() for driver, peer in (("vllm", VLLM), ("llama", LLAMA)) if driver in drivers]
    return f"Peers: {', '.join((*told, 'transformers of our own environment'))}."


NOTES = (
    "The model is SmolLM2-135M: the same float32 weights for all but the formats named, F32 and F16 files written by "
    "llama.cpp from the Q4_1 file that all come from.",
    "Only one process runs, the others are stopped (SIGSTOP); greedy, token ids in and out.",
    "Ours is a whole worker in its process (schedule, inputs, model, sampler, commit, mailbox, poll), vLLM its "
    "engine's `step()` (float32, eager, prefix cache off), llama.cpp its batch interface (F16 KV, its default), "
    "transformers a static batch.",
    "A limit is the larger of bytes over read bandwidth and operations over the rate of matrix products, of the "
    "same round; for weights below float32, of the fastest precision that the machine has.",
)
