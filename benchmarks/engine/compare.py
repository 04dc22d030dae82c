"""The part `engine`: tokens per second of prefill and decode, beside peers and the machine's limits.

    round:  limits, then every engine in turn while all others are stopped; the next round in the opposite order

All engines get the same prompts in a round. A prefill is timed to its first token; for a decode the median step counts.
Two clocks: wall time, and CPU time of all threads of the process.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from benchmarks.engine.driver_processes import DISTURBED, LoadedEngines, Program, load_engines
from benchmarks.engine.drivers.protocol import EngineDriverConfig, Task
from benchmarks.engine.engines import DETERMINISTIC, LLAMA_ROWS, OURS, VLLM_ROW, BenchmarkedEngine, engines
from benchmarks.engine.limits import Column, DecoderSize, most_tokens
from benchmarks.environments import LLAMA, VLLM
from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, Spread, ratios, spread
from benchmarks.hosted import model_folder
from benchmarks.timed_request import random_prompt
from cluster.offline.load.machine import allowed_cores
from cluster.offline.load.processes import ProcessFailed

ROUNDS = 5
THREADS = 2
TRIES = 3
UNTIMED_TOKENS = 10  # a decode's prompts are shorter than its timed context by this
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
Samples = Mapping[tuple[str, str], Sequence[tuple[float, float]]]  # engine, column -> the step of each round
Measured = Sequence[Mapping[str, float]]  # results of `drivers.limits` by round


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """An engine that is missing or fails to load or warm up is left out with a note. Raises `ProcessFailed`."""
    threads = min(THREADS, len(allowed_cores()))
    found, left_out = engines(threads, quick)
    columns = QUICK_COLUMNS if quick else COLUMNS
    progress(f"loading {', '.join(each.name for each in found)}")
    programs = {each.name: each.program for each in found} | {LIMITS: Program(LIMITS, EngineDriverConfig("", threads))}
    with load_engines(programs, tries=1 if quick else TRIES) as loaded:
        failed = dict(loaded.failed) | _warm_up(loaded, columns[0].context)
        left_out += tuple(f"{name} was left out: {why}" for name, why in failed.items())
        present = [each for each in found if each.name not in failed]
        samples, measured = _rounds(loaded, [each.name for each in present], columns, rounds, progress)
    notes = (f"{threads} threads each.", *NOTES, _disturbances(loaded), _versions(present), *left_out)
    return BenchmarkPart(
        "engine", figures(samples, measured, present, columns, decoder_size()), claims(samples, present), notes
    )


def _warm_up(loaded: LoadedEngines, length: int) -> dict[str, str]:
    """Run one untimed prompt on every engine. Returns the error of each engine that fails."""
    failed = {}
    for name in loaded.names:
        try:
            loaded.ask(name, Task((random_prompt(random.Random(1), length),)))
        except ProcessFailed as error:
            failed[name] = str(error)
    return failed


def _rounds(
    loaded: LoadedEngines, names: Sequence[str], columns: Sequence[Column], rounds: int, progress: Progress
) -> tuple[Samples, Measured]:
    draw = random.Random(0)
    largest = columns[-1]
    contexts = tuple(random_prompt(draw, largest.context - UNTIMED_TOKENS) for _ in range(largest.batch))
    samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    measured = []
    for number in range(rounds):
        measured.append(loaded.ask(LIMITS, Task(())))
        prompt = random_prompt(draw, columns[0].context)
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


def decoder_size() -> DecoderSize:
    """The size of the measured model."""
    from workers.model.folder import ModelFolder, count_parameters

    folder = model_folder()
    config = json.loads((folder / "config.json").read_text())
    return DecoderSize.of(config, count_parameters(ModelFolder(folder.name, folder)))


def figures(
    samples: Samples,
    measured: Measured,
    present: Sequence[BenchmarkedEngine],
    columns: Sequence[Column],
    size: DecoderSize,
) -> tuple[Figure, ...]:
    rates = {
        (each.name, column.name, clock): [column.tokens / step[clock] for step in samples[each.name, column.name]]
        for each in present
        for column in columns
        for clock in (0, 1)
    }
    allowed = {
        (weights, column.name): [most_tokens(size, column, weights, found) for found in measured]
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
        Figure(MACHINE, _limit_name(name), "best", "GB/s" if name.startswith("read ") else "GFLOP/s", spread(of_rounds))
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


def _limit_name(limit: str) -> str:
    """A readable name of a limit such as "read 2" or "float32 1024x576x1536"."""
    kind, _, size = limit.partition(" ")
    if kind == "read":
        return f"memory read, {size} thread{'s' if size != '1' else ''}"
    return f"matrix product, {kind} {size.replace('x', ' x ')}"


def _compared(samples: Samples, ours: str, other: str, column: str) -> Spread:
    """Our speed over the other's, by round: the inverse ratio of their times."""
    theirs_s, ours_s = ([wall_s for wall_s, _ in samples[name, column]] for name in (other, ours))
    return ratios(theirs_s, ours_s)


def claims(samples: Samples, present: Sequence[BenchmarkedEngine]) -> tuple[BenchmarkClaim, ...]:
    """Claims whose two engines were measured; medians of the ratios by round."""
    return tuple(
        BenchmarkClaim(
            f"{column}: {ours} / {other}", _compared(samples, ours, other, column).median, bound, "x", at_least=True
        )
        for column, ours, other, bound in _targets(samples, present)
        if (ours, column) in samples and (other, column) in samples
    )


def _targets(samples: Samples, present: Sequence[BenchmarkedEngine]) -> Iterator[tuple[str, str, str, float]]:
    """(column, our engine, the other engine, minimum ratio)."""
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


def _disturbances(loaded: LoadedEngines) -> str:
    return (
        f"{loaded.tasks} measurements; {loaded.retries} retries because other processes used over {DISTURBED:.0%} of "
        f"the machine; {loaded.disturbed} measurements stayed disturbed."
    )


def _versions(present: Sequence[BenchmarkedEngine]) -> str:
    drivers = {each.program.driver for each in present}
    peers = [peer.versions() for driver, peer in (("vllm", VLLM), ("llama", LLAMA)) if driver in drivers]
    return f"Peers: {', '.join((*peers, 'transformers of our own environment'))}."


NOTES = (
    "The model is SmolLM2-135M: the same float32 weights for all but the formats named, F32 and F16 files written by "
    "llama.cpp from the Q4_1 file that all come from.",
    "Only one process runs, the others are stopped (SIGSTOP); greedy, token ids in and out.",
    "Diptych is a whole worker in its process (schedule, inputs, model, sampler, commit, mailbox, poll), vLLM its "
    "engine's `step()` (float32, eager, prefix cache off), llama.cpp its batch interface (F16 KV, its default), "
    "transformers a static batch.",
    "A limit is the larger of bytes over read bandwidth and operations over the rate of matrix products of the "
    "same round; for weights below float32, of the machine's fastest precision.",
)
