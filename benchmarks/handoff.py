"""The cost of a KV handoff for one user: a split cluster beside a colocated one, measured in turns.

    split      first token ── KV moves, decode begins ──> second token ── step ──> third ...
    colocated  first token ──────────── step ──────────> second token ── step ──> third ...

Target: the split cluster's second token arrives at most one decode step later than the colocated one's.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.hosted import Hosted, hosted, mixed_spec, split_spec
from benchmarks.timed_request import AnswerTiming, random_prompt, send_request
from diptych.client import AsyncClient

LENGTHS = (64, 256, 1024, 2000)
QUICK_LENGTHS = (64, 256)
NUM_TOKENS = 12
ROUNDS = 5
SYSTEMS = ("split", "colocated")


@dataclass(frozen=True, slots=True)
class HandoffSample:
    """One request's figures, in seconds."""

    ttft_s: float
    second_s: float
    step_s: float
    tpot_s: float
    waited_s: float  # for the transfer, from the ledger
    pulled_s: float

    @staticmethod
    def of(answer: AnswerTiming) -> "HandoffSample":
        times, reports = answer.times, answer.completed.transfers
        pulled_s = sum(report.elapsed_s for report in reports)
        return HandoffSample(
            times.ttft_s, times.second_s, times.step_s, times.tpot_s, answer.ledger_s("transfer_wait"), pulled_s
        )


Samples = Mapping[int, Mapping[str, Sequence[HandoffSample]]]  # prompt length -> system -> rounds


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` or `DiptychError`."""
    with hosted([split_spec(), mixed_spec()]) as clusters:
        samples = asyncio.run(_rounds(clusters, QUICK_LENGTHS if quick else LENGTHS, rounds, progress))
    return BenchmarkPart("handoff", figures(samples), claims(samples), NOTES)


async def _rounds(clusters: Hosted, lengths: Sequence[int], rounds: int, progress: Progress) -> Samples:
    samples: dict[int, dict[str, list[HandoffSample]]] = {length: defaultdict(list) for length in lengths}
    draw = random.Random(0)
    async with (
        AsyncClient(clusters.endpoints["split"]) as split,
        AsyncClient(clusters.endpoints["colocated"]) as colocated,
    ):
        clients = dict(zip(SYSTEMS, (split, colocated), strict=True))
        for client in clients.values():
            await client.wait_ready(60.0)
            await send_request(client, random_prompt(draw, 256), NUM_TOKENS)  # warm up
        for number in range(rounds):
            for length in lengths:
                for name in SYSTEMS if number % 2 == 0 else reversed(SYSTEMS):
                    answer = await send_request(clients[name], random_prompt(draw, length), NUM_TOKENS)
                    moved = len(answer.completed.transfers)
                    assert moved == (name == "split"), f"{name} made {moved} transfers"
                    samples[length][name].append(HandoffSample.of(answer))
                progress(f"round {number + 1} of {rounds}: {length} tokens")
    return samples


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    title = f"KV handoff: split against colocated, one request at a time, {NUM_TOKENS} tokens out"
    for length, of_system in samples.items():
        row = f"{length} tokens"
        for what, read in READINGS.items():
            for name in SYSTEMS:
                made.append(Figure(title, row, f"{what} {name}", "ms", spread(map(read, of_system[name]))))
        for what, read in COMPARED.items():
            ours, theirs = ([read(each) for each in of_system[name]] for name in SYSTEMS)
            made.append(Figure("The same as split / colocated", row, what, "x", ratios(ours, theirs)))
        waits = "Where the second token of the split cluster waits"
        for what, read in WAITS.items():
            made.append(Figure(waits, row, what, "ms", spread(map(read, of_system["split"]))))
    return tuple(made)


def claims(samples: Samples) -> tuple[BenchmarkClaim, ...]:
    """One for each length: medians of the rounds, the bound from the colocated cluster."""
    made = []
    for length, of_system in samples.items():
        second_s = {name: median(each.second_s for each in of_system[name]) for name in SYSTEMS}
        bound_s = second_s["colocated"] + median(each.step_s for each in of_system["colocated"])
        what = f"{length} tokens: first to second token, split (colocated plus one decode step)"
        made.append(BenchmarkClaim(what, second_s["split"], bound_s, "ms"))
    return tuple(made)


READINGS: Mapping[str, Callable[[HandoffSample], float]] = {
    "TTFT": lambda each: each.ttft_s,
    "2nd - 1st": lambda each: each.second_s,
    "step": lambda each: each.step_s,
}
COMPARED: Mapping[str, Callable[[HandoffSample], float]] = {**READINGS, "TPOT": lambda each: each.tpot_s}
WAITS: Mapping[str, Callable[[HandoffSample], float]] = {
    "2nd - 1st": lambda each: each.second_s,
    "transfer wait (ledger)": lambda each: each.waited_s,
    "pull, begin to end": lambda each: each.pulled_s,
}
NOTES = (
    "Both clusters run on one Ray with one thread per worker, and are measured in turns; the other one idles.",
    "Times are measured at the client; the transfer wait is from the ledger, the pull's time from its report.",
    "Prompts are random, so no prefix cache helps. The model is SmolLM2-135M in float32.",
)
