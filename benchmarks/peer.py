"""Time to first token of the split cluster, beside a vLLM prefill/decode pair on the same cores.

    round:  the pair, unpinned and pinned  ─>  the pair is stopped; our cluster, unpinned and pinned  ─>  next round

Only one of the two runs at a time. Target: at most half the time to first token of the pair's better
configuration, whichever that is at this length.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.environments import VLLM
from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, Spread, spread
from benchmarks.handoff import LENGTHS, NUM_TOKENS, QUICK_LENGTHS
from benchmarks.hosted import hosted, model_folder, split_spec
from benchmarks.pinning import paused, pin
from benchmarks.timed_request import random_prompt, send_request
from benchmarks.vllm_pair import PairAnswer, VllmPair, pair
from cluster.offline.load.machine import allowed_cores
from cluster.offline.load.processes import ProcessFailed
from diptych.client import AsyncClient

ROUNDS = 3
AIM = 0.5
TRIES = 3
OURS, THEIRS = "diptych", "vLLM pair"
CONFIGURATIONS = ("unpinned", "pinned")


@dataclass(frozen=True, slots=True)
class PeerSample:
    """One request, in seconds. `prefilled_s`: until the reply of the pair's prefill server."""

    ttft_s: float
    second_s: float
    step_s: float
    prefilled_s: float | None = None


Samples = Mapping[tuple[int, str, str], Sequence[PeerSample]]  # prompt length, system, configuration


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Skipped when the peer is not installed. Raises `ProcessFailed` or `DiptychError`."""
    reason = VLLM.missing()
    if reason:
        return BenchmarkPart("peer", skipped=reason)
    cores = allowed_cores()
    if len(cores) < 2:
        return BenchmarkPart("peer", skipped="needs two cores: one for each side")
    lengths = QUICK_LENGTHS if quick else LENGTHS
    samples: dict[tuple[int, str, str], list[PeerSample]] = defaultdict(list)
    draw = random.Random(0)
    progress("starting the pair")
    with pair(model_folder()) as peer:
        for number in range(rounds):
            _measure_pair(peer, lengths, draw, samples, cores, progress)
            progress(f"round {number + 1} of {rounds}: the pair is done")
            with paused(peer.pids()), hosted([split_spec()]) as ours:
                asyncio.run(_measure_ours(ours.endpoints["split"], lengths, draw, samples, cores))
            progress(f"round {number + 1} of {rounds}: done")
    notes = (*NOTES, f"The peer is {VLLM.versions()}, float32, eager, prefix cache off, one thread per server.")
    return BenchmarkPart("peer", figures(samples), claims(samples), notes)


def _measure_pair(
    peer: VllmPair,
    lengths: Sequence[int],
    draw: random.Random,
    samples: dict[tuple[int, str, str], list[PeerSample]],
    cores: Sequence[int],
    progress: Progress,
) -> None:
    places = {"unpinned": (cores, cores), "pinned": (cores[:1], cores[1:2])}
    for configuration in CONFIGURATIONS:
        for server, allowed in zip((peer.prefill, peer.decode), places[configuration], strict=True):
            pin(server.pids(), allowed)
        _generate_with_retry(peer, 64, draw, progress)
        for length in lengths:
            answer = _generate_with_retry(peer, length, draw, progress)
            times = answer.times
            samples[length, THEIRS, configuration].append(
                PeerSample(times.ttft_s, times.second_s, times.step_s, answer.prefill_s)
            )


def _generate_with_retry(peer: VllmPair, length: int, draw: random.Random, progress: Progress) -> PairAnswer:
    """Retry failed requests, untimed: the first ones may fail while the servers connect to each other."""
    for _ in range(TRIES - 1):
        try:
            return peer.generate(random_prompt(draw, length), NUM_TOKENS)
        except (ProcessFailed, OSError) as error:
            progress(f"the pair failed, retrying: {error}")
    return peer.generate(random_prompt(draw, length), NUM_TOKENS)


async def _measure_ours(
    endpoint: str,
    lengths: Sequence[int],
    draw: random.Random,
    samples: dict[tuple[int, str, str], list[PeerSample]],
    cores: Sequence[int],
) -> None:
    places = {"unpinned": (cores, cores), "pinned": (cores[:1], cores[1:2])}
    async with AsyncClient(endpoint) as client:
        await client.wait_ready(60.0)
        pids = {worker.pool: worker.pid for worker in (await client.status()).view.workers}
        for configuration in CONFIGURATIONS:
            for pool, allowed in zip(("prefill", "decode"), places[configuration], strict=True):
                pin([pids[pool]], allowed)
            await send_request(client, random_prompt(draw, 64), NUM_TOKENS)
            for length in lengths:
                times = (await send_request(client, random_prompt(draw, length), NUM_TOKENS)).times
                samples[length, OURS, configuration].append(PeerSample(times.ttft_s, times.second_s, times.step_s))


def better_configuration(samples: Samples, length: int, system: str) -> str:
    """The configuration with the lowest median time to first token."""
    return min(CONFIGURATIONS, key=lambda name: median(each.ttft_s for each in samples[length, system, name]))


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    lengths = list(dict.fromkeys(length for length, _, _ in samples))
    for length in lengths:
        row = f"{length} tokens"
        for system in (OURS, THEIRS):
            for name in CONFIGURATIONS:
                taken = samples[length, system, name]
                made.append(Figure("Time to first token", row, f"{system} {name}", "ms", _over(taken, "ttft_s")))
                for what, field in (("2nd - 1st", "second_s"), ("step", "step_s")):
                    title = f"After the first token, {name}"
                    made.append(Figure(title, row, f"{what} {system}", "ms", _over(taken, field)))
                if system == THEIRS:
                    title = "Reply of the pair's prefill server, which its client does not see as a token"
                    made.append(Figure(title, row, name, "ms", _over(taken, "prefilled_s")))
    for length in lengths:
        theirs = better_configuration(samples, length, THEIRS)
        bound = median(each.ttft_s for each in samples[length, THEIRS, theirs])
        replied = median(each.prefilled_s or 0.0 for each in samples[length, THEIRS, theirs])
        for name in CONFIGURATIONS:
            taken = samples[length, OURS, name]
            title = "Our time to first token / that of the pair's better configuration"
            row = f"{length} tokens (pair {theirs})"
            made.append(Figure(title, row, f"diptych {name}", "x", spread(each.ttft_s / bound for each in taken)))
            compared = spread(each.ttft_s / replied for each in taken)
            made.append(Figure(title, row, f"{name}, to its prefill reply", "x", compared))
    return tuple(made)


def _over(samples: Sequence[PeerSample], field: str) -> Spread:
    return spread(getattr(each, field) for each in samples)


def claims(samples: Samples) -> tuple[BenchmarkClaim, ...]:
    """One for each length: the better configuration of each side, medians of the rounds."""
    made = []
    for length in dict.fromkeys(length for length, _, _ in samples):
        chosen = {system: better_configuration(samples, length, system) for system in (OURS, THEIRS)}
        value, base = (
            median(each.ttft_s for each in samples[length, system, chosen[system]]) for system in (OURS, THEIRS)
        )
        what = f"{length} tokens: TTFT, {OURS} {chosen[OURS]} / {THEIRS} {chosen[THEIRS]}"
        made.append(BenchmarkClaim(what, value / base, AIM, "x"))
    return tuple(made)


NOTES = (
    "The pair's time to first token ends with the first token that its decode server streams, as its users see it.",
    "Pinned: one core per vLLM server with all its processes; one per worker of ours, gateway and Ray unpinned.",
    "While our cluster is measured, the pair is stopped (SIGSTOP); while the pair is measured, ours does not run.",
)
