"""What everything but the model costs: modelled workers that compute nothing, beside less and less of the system.

    door    gRPC client ─> door                                                   answers from memory
    local   gRPC client ─> door ─> dispatcher ─> workers, all in one process      no Ray
    ray     gRPC client ─> door ─> dispatcher ─> Ray actors                       the whole

Short and long answers at the same concurrency give the cost of a token and that of a request apart. The CPU seconds
are those of all processes of the system under test; the client has its own.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.asking import Asked, ask
from benchmarks.figures import Figure, Part, Progress, ratios, spread
from benchmarks.hosted import Hosted, hosted, split_spec
from benchmarks.pinning import family_cpu_s
from cluster.spec import ClusterSpec
from diptych.client import AsyncClient
from workers.config import TransferConfig

WAYS = ("door", "local", "ray")
CONCURRENCIES = (1, 16, 64)
QUICK_CONCURRENCIES = (1, 16)
SHORT, LONG = 2, 258  # output tokens; one token alone would not be handed over
PROMPT_TOKENS = 32
BLOCKS = 3072  # both halves of the largest burst; never written, so they take no memory
VOCABULARY = 1000  # of modelled workers
LEAST_REQUESTS, REQUESTS_EACH = 32, 4
QUICK_REQUESTS = 16
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Burst:
    """`requests` answers of one length. `cpu_s`: of all processes of the system."""

    requests: int
    wall_s: float
    cpu_s: float
    ttft_s: float
    gap_s: float
    tokens_a_message: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A short and a long burst, and what follows from the two."""

    short: Burst
    long: Burst

    @property
    def token_wall_s(self) -> float:
        """Wall time for one more token, of all requests at once."""
        return _slope(self.short.wall_s / self.short.requests, self.long.wall_s / self.long.requests)

    @property
    def token_cpu_s(self) -> float:
        return _slope(self.short.cpu_s / self.short.requests, self.long.cpu_s / self.long.requests)

    @property
    def request_cpu_s(self) -> float:
        """What a request costs besides its tokens."""
        return max(0.0, self.short.cpu_s / self.short.requests - SHORT * self.token_cpu_s)

    @property
    def requests_a_core_s(self) -> float:
        """Long answers for a second of one core."""
        return self.long.requests / max(self.long.cpu_s, 1e-9)


def _slope(short_s: float, long_s: float) -> float:
    return max(1e-9, (long_s - short_s) / (LONG - SHORT))


Samples = Mapping[tuple[int, str], Sequence[Sample]]  # concurrency, way


def measure(rounds: int, quick: bool, progress: Progress) -> Part:
    """Raises `ProcessFailed` or `DiptychError`."""
    samples: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    with ExitStack() as stack:
        systems = {way: stack.enter_context(hosted([_spec(way)], way)) for way in WAYS}
        for number in range(rounds):
            for concurrency in QUICK_CONCURRENCIES if quick else CONCURRENCIES:
                requests = QUICK_REQUESTS if quick else max(LEAST_REQUESTS, REQUESTS_EACH * concurrency)
                for way, system in systems.items():
                    sample = asyncio.run(_sample(system, way, concurrency, max(requests, concurrency)))
                    samples[concurrency, way].append(sample)
                progress(f"round {number + 1} of {rounds}: {concurrency} at once")
    return Part("overhead", figures(samples), (), NOTES)


def _spec(way: str) -> ClusterSpec:
    spec = split_spec(way, executor="modelled")
    roomy = [replace(pool.engine, kv_blocks=BLOCKS, max_batch_tokens=2048, max_running=64) for pool in spec.pools]
    pools = tuple(replace(pool, engine=engine) for pool, engine in zip(spec.pools, roomy, strict=True))
    return replace(spec, pools=pools, transfer=TransferConfig(backends=("modelled",)))


async def _sample(system: Hosted, way: str, concurrency: int, requests: int) -> Sample:
    async with AsyncClient(system.endpoints[way]) as client:
        await client.wait_ready(60.0)
        await _burst(system, client, concurrency, concurrency, SHORT)  # connections, caches
        short = await _burst(system, client, concurrency, requests, SHORT)
        return Sample(short, await _burst(system, client, concurrency, requests, LONG))


async def _burst(system: Hosted, client: AsyncClient, concurrency: int, requests: int, num_tokens: int) -> Burst:
    """`requests` answers, `concurrency` of them at any time."""
    draw = random.Random()
    left = iter(range(requests))
    answers: list[Asked] = []

    async def one_after_another() -> None:
        for _ in left:
            prompt = draw.choices(range(1, VOCABULARY), k=PROMPT_TOKENS)
            answers.append(await ask(client, prompt, num_tokens))

    cpu_s, begun = family_cpu_s(system.child), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    wall_s = time.perf_counter() - begun
    return Burst(
        requests,
        wall_s,
        family_cpu_s(system.child) - cpu_s,
        median(answer.timed.ttft_s for answer in answers),
        median(answer.timed.tpot_s for answer in answers),
        requests * num_tokens / sum(answer.messages for answer in answers),
    )


READINGS: Mapping[str, tuple[str, Callable[[Sample], float]]] = {
    "Wall time of one more token, all requests together": ("us", lambda each: each.token_wall_s),
    "CPU time of one more token": ("us", lambda each: each.token_cpu_s),
    "CPU time of a request besides its tokens": ("us", lambda each: each.request_cpu_s),
    f"Requests of {LONG} tokens for a second of one core": ("1/s", lambda each: each.requests_a_core_s),
    "Time to first token": ("ms", lambda each: each.long.ttft_s),
    "Time between tokens, as one client sees it": ("ms", lambda each: each.long.gap_s),
    "Tokens in a message": ("x", lambda each: each.long.tokens_a_message),
}
AGAINST = {"local / door": ("local", "door"), "ray / local": ("ray", "local"), "ray / door": ("ray", "door")}


def figures(samples: Samples) -> tuple[Figure, ...]:
    concurrencies = list(dict.fromkeys(concurrency for concurrency, _ in samples))
    made: list[Figure] = []
    for title, (unit, read) in READINGS.items():
        for concurrency in concurrencies:
            row = f"{concurrency} at once"
            values = {way: [read(each) for each in samples[concurrency, way]] for way in WAYS}
            made += [Figure(title, row, way, unit, spread(values[way])) for way in WAYS]
            if unit != "x":
                made += [
                    Figure(title, row, name, "x", ratios(values[ours], values[theirs]))
                    for name, (ours, theirs) in AGAINST.items()
                    if min(values[theirs]) > 0
                ]
    return tuple(made)


NOTES = (
    "Workers neither compute nor move bytes: leases, tickets and hand-offs are real, their KV is not.",
    "Such workers run ahead of their readers, so tokens come in bundles (tokens in a message); a real model's do not.",
    "The three systems are up together and asked in turns; what an idle one uses is in nobody else's CPU time.",
)
