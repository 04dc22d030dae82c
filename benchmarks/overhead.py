"""The cost of everything but the model: workers that compute nothing, behind smaller and smaller parts of the system.

    server  gRPC client ─> server                                                 stub dispatcher
    local   gRPC client ─> server ─> dispatcher ─> workers, all in one process    no Ray
    ray     gRPC client ─> server ─> dispatcher ─> Ray actors                     the whole system

Short and long answers at the same concurrency separate the cost of a token from that of a request. CPU seconds are
those of all processes of the system under test, without the client.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.hosted import Hosted, hosted, split_spec
from benchmarks.pinning import family_cpu_s
from benchmarks.timed_request import AnswerTiming, send_request
from cluster.spec import ClusterSpec
from diptych.client import AsyncClient
from workers.config import TransferConfig

SYSTEMS = ("server", "local", "ray")
CONCURRENCIES = (1, 16, 64)
QUICK_CONCURRENCIES = (1, 16)
SHORT, LONG = 2, 258  # output tokens; a single token needs no KV handoff
PROMPT_TOKENS = 32
BLOCKS = 3072  # enough for the largest burst; never written, so they take no memory
VOCABULARY = 1000  # of simulated workers
MIN_REQUESTS, REQUESTS_EACH = 32, 4
QUICK_REQUESTS = 16
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class BurstResult:
    """`requests` answers of one length. `cpu_s`: of all processes of the system."""

    requests: int
    wall_s: float
    cpu_s: float
    ttft_s: float
    gap_s: float
    tokens_per_message: float


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """A short and a long burst, and the costs derived from them."""

    short: BurstResult
    long: BurstResult

    @property
    def token_wall_s(self) -> float:
        """Wall time of one more token, over all concurrent requests."""
        return _slope(self.short.wall_s / self.short.requests, self.long.wall_s / self.long.requests)

    @property
    def token_cpu_s(self) -> float:
        return _slope(self.short.cpu_s / self.short.requests, self.long.cpu_s / self.long.requests)

    @property
    def request_cpu_s(self) -> float:
        """CPU seconds of a request without its tokens."""
        return max(0.0, self.short.cpu_s / self.short.requests - SHORT * self.token_cpu_s)

    @property
    def requests_per_core_s(self) -> float:
        """Long answers per CPU second."""
        return self.long.requests / max(self.long.cpu_s, 1e-9)


def _slope(short_s: float, long_s: float) -> float:
    return max(1e-9, (long_s - short_s) / (LONG - SHORT))


Samples = Mapping[tuple[int, str], Sequence[OverheadSample]]  # concurrency, system


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` or `DiptychError`."""
    samples: dict[tuple[int, str], list[OverheadSample]] = defaultdict(list)
    with ExitStack() as stack:
        systems = {system: stack.enter_context(hosted([_spec(system)], system)) for system in SYSTEMS}
        for number in range(rounds):
            for concurrency in QUICK_CONCURRENCIES if quick else CONCURRENCIES:
                requests = QUICK_REQUESTS if quick else max(MIN_REQUESTS, REQUESTS_EACH * concurrency)
                for system, clusters in systems.items():
                    sample = asyncio.run(_sample(clusters, system, concurrency, max(requests, concurrency)))
                    samples[concurrency, system].append(sample)
                progress(f"round {number + 1} of {rounds}: {concurrency} at once")
    return BenchmarkPart("overhead", figures(samples), (), NOTES)


def _spec(system: str) -> ClusterSpec:
    spec = split_spec(system, executor="simulated")
    with_room = [replace(pool.engine, kv_blocks=BLOCKS, max_batch_tokens=2048, max_running=64) for pool in spec.pools]
    pools = tuple(replace(pool, engine=engine) for pool, engine in zip(spec.pools, with_room, strict=True))
    return replace(spec, pools=pools, transfer=TransferConfig(backends=("simulated",)))


async def _sample(clusters: Hosted, system: str, concurrency: int, requests: int) -> OverheadSample:
    async with AsyncClient(clusters.endpoints[system]) as client:
        await client.wait_ready(60.0)
        await _burst(clusters, client, concurrency, concurrency, SHORT)  # connections, caches
        short = await _burst(clusters, client, concurrency, requests, SHORT)
        return OverheadSample(short, await _burst(clusters, client, concurrency, requests, LONG))


async def _burst(
    clusters: Hosted, client: AsyncClient, concurrency: int, requests: int, num_tokens: int
) -> BurstResult:
    """Run `requests` requests, `concurrency` at a time."""
    source = random.Random()
    left = iter(range(requests))
    answers: list[AnswerTiming] = []

    async def send_all() -> None:
        for _ in left:
            prompt = source.choices(range(1, VOCABULARY), k=PROMPT_TOKENS)
            answers.append(await send_request(client, prompt, num_tokens))

    cpu_s, begun = family_cpu_s(clusters.child), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(send_all())
    wall_s = time.perf_counter() - begun
    return BurstResult(
        requests,
        wall_s,
        family_cpu_s(clusters.child) - cpu_s,
        median(answer.times.ttft_s for answer in answers),
        median(answer.times.tpot_s for answer in answers),
        requests * num_tokens / sum(answer.messages for answer in answers),
    )


READINGS: Mapping[str, tuple[str, Callable[[OverheadSample], float]]] = {
    "Wall time of one more token, all requests together": ("us", lambda each: each.token_wall_s),
    "CPU time of one more token": ("us", lambda each: each.token_cpu_s),
    "CPU time of a request besides its tokens": ("us", lambda each: each.request_cpu_s),
    f"Requests of {LONG} tokens for a second of one core": ("1/s", lambda each: each.requests_per_core_s),
    "Time to first token": ("ms", lambda each: each.long.ttft_s),
    "Time between tokens, as one client sees it": ("ms", lambda each: each.long.gap_s),
    "Tokens in a message": ("x", lambda each: each.long.tokens_per_message),
}
AGAINST = {"local / server": ("local", "server"), "ray / local": ("ray", "local"), "ray / server": ("ray", "server")}


def figures(samples: Samples) -> tuple[Figure, ...]:
    concurrencies = list(dict.fromkeys(concurrency for concurrency, _ in samples))
    made: list[Figure] = []
    for title, (unit, read) in READINGS.items():
        for concurrency in concurrencies:
            row = f"{concurrency} at once"
            values = {system: [read(each) for each in samples[concurrency, system]] for system in SYSTEMS}
            made += [Figure(title, row, system, unit, spread(values[system])) for system in SYSTEMS]
            if unit != "x":
                made += [
                    Figure(title, row, name, "x", ratios(values[ours], values[theirs]))
                    for name, (ours, theirs) in AGAINST.items()
                    if min(values[theirs]) > 0
                ]
    return tuple(made)


NOTES = (
    "Workers neither compute nor move bytes: leases, tickets and KV handoffs are real, the KV is not.",
    "Such workers run ahead of their readers, so a message carries several tokens; with a real model it carries one.",
    "The three systems run together and are measured in turns; the CPU time of the idle ones is not counted.",
)
