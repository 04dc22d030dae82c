"""The first token of a chat's later turn, by where the KV of its history is: computed again, or kept in one tier.

    turn 1   prompt ──────────────────────> answer      of each session, one after another
    turn 2   prompt, answer, question ────> answer      the device has forgotten the session by then

Each system keeps the sessions in one place alone; `fetch`: on the decode worker's device, from where the prefill worker
gets them. A round is a seed: other prompts, the same for all systems.
"""

import asyncio
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from statistics import median, quantiles

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from benchmarks.hosted import Hosted, hosted, mixed_spec, split_spec
from benchmarks.timed_request import random_prompt, send_request
from benchmarks.turns import TurnSample
from cluster.spec import ClusterSpec, PoolSpec, Resources
from diptych.client import AsyncClient
from workers.config import ByteSize, CacheConfig, DiskCacheConfig

ROUNDS = 5
SESSIONS, QUICK_SESSIONS = 8, 5
PROMPT, ANSWER, QUESTION = 1016, 16, 24  # tokens; the answer crosses a multiple of 128, so that routers see it
LAST_ANSWER = 4  # nobody reads it
PAUSE_S = 1.0  # between turns: longer than cache events take to arrive
DEVICE_BLOCKS = 192  # two sessions and a half
ALL_BLOCKS = 1024  # all sessions
HOST_ALL, HOST_FEW = ByteSize(1 << 30), ByteSize(160 << 20)
DISK = ByteSize(4 << 30)
SHARE = Resources(cpu=0.25)  # for Ray's accounting: five workers fit on two cores
COMPUTE = "compute"
SYSTEMS = (COMPUTE, "host", "disk", "fetch")
MOST_OF_COMPUTING = 0.35  # TTFT
TITLE = f"Turn 2 of {SESSIONS} chats, {PROMPT + ANSWER} tokens of history"

Samples = dict[str, list[TurnSample]]  # of turn 2, by system


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` or `DiptychError`."""
    with tempfile.TemporaryDirectory(prefix="diptych-chats-") as folder, hosted(_specs(folder)) as clusters:
        samples = asyncio.run(_rounds(clusters, QUICK_SESSIONS if quick else SESSIONS, rounds, progress))
    return BenchmarkPart("chats", figures(samples), claims(samples), NOTES)


def _specs(folder: str) -> list[ClusterSpec]:
    colocated = mixed_spec()
    mixed = _sized(colocated.pools[0], DEVICE_BLOCKS)
    compute = replace(mixed, engine=replace(mixed.engine, prefix_caching=False))
    host = replace(mixed, cache=CacheConfig(HOST_ALL))
    disk = replace(mixed, cache=CacheConfig(HOST_FEW, disk=DiskCacheConfig(folder, DISK)))
    split = split_spec("fetch")
    prefill, decode = split.pools
    pools = (_sized(prefill, DEVICE_BLOCKS), _sized(decode, ALL_BLOCKS))
    fetch = replace(split, pools=pools, gateway=replace(split.gateway, routing="slo"))
    single = zip(SYSTEMS, (compute, host, disk), strict=False)
    return [*(replace(colocated, name=name, pools=(pool,)) for name, pool in single), fetch]


def _sized(pool: PoolSpec, kv_blocks: int) -> PoolSpec:
    return replace(pool, engine=replace(pool.engine, kv_blocks=kv_blocks), resources=SHARE)


async def _rounds(clusters: Hosted, sessions: int, rounds: int, progress: Progress) -> Samples:
    samples: Samples = defaultdict(list)
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(AsyncClient(clusters.endpoints[name])) for name in SYSTEMS}
        for client in clients.values():
            await client.wait_ready(60.0)
            await send_request(client, random_prompt(random.Random(-1), PROMPT), LAST_ANSWER)  # measures its costs
        for seed in range(rounds):
            for name in SYSTEMS if seed % 2 else reversed(SYSTEMS):
                samples[name] += await _chats(clients[name], random.Random(seed), sessions)
                taken = samples[name][-sessions:]
                ttft_s = median(each.ttft_s for each in taken)
                cached = median(each.cached_tokens for each in taken)
                progress(f"seed {seed + 1} of {rounds}, {name}: TTFT {ttft_s:.2f} s, {cached:.0f} tokens cached")
    return samples


async def _chats(client: AsyncClient, draw: random.Random, sessions: int) -> list[TurnSample]:
    talks: list[tuple[int, ...]] = []
    for _ in range(sessions):
        prompt = random_prompt(draw, PROMPT)
        answer = await send_request(client, prompt, ANSWER)
        talks.append((*prompt, *answer.tokens, *random_prompt(draw, QUESTION)))
    await asyncio.sleep(PAUSE_S)
    samples = []
    for talk in talks:
        answer = await send_request(client, talk, LAST_ANSWER)
        samples.append(TurnSample(answer.times.ttft_s, len(talk), answer.completed.cached_tokens))
    return samples


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    computing = _percentiles(samples[COMPUTE])
    for name, taken in samples.items():
        p50, p99 = _percentiles(taken)
        made += [
            Figure(TITLE, name, "TTFT", "s", spread(each.ttft_s for each in taken)),
            Figure(TITLE, name, "p99", "s", spread([p99])),
            Figure(TITLE, name, "p50 / compute", "x", spread([p50 / computing[0]])),
            Figure(TITLE, name, "p99 / compute", "x", spread([p99 / computing[1]])),
            Figure(TITLE, name, "cached", "n", spread(each.cached_tokens for each in taken)),
        ]
    return tuple(made)


def claims(samples: Samples) -> tuple[BenchmarkClaim, ...]:
    """Two for each system that keeps KV: it finds the history up to a block, and needs a third of the time."""
    made: list[BenchmarkClaim] = []
    block = mixed_spec().pools[0].engine.block_size
    computing_s, _ = _percentiles(samples[COMPUTE])
    for name in SYSTEMS[1:]:
        taken = samples[name]
        found = median(each.cached_tokens for each in taken)
        made.append(BenchmarkClaim(f"{name}: cached tokens", found, PROMPT + ANSWER - block, "n", at_least=True))
        share = _percentiles(taken)[0] / computing_s
        made.append(BenchmarkClaim(f"{name}: TTFT of turn 2, of computing", share, MOST_OF_COMPUTING, "x"))
    return tuple(made)


def _percentiles(taken: Sequence[TurnSample]) -> tuple[float, float]:
    """p50 and p99 of the TTFT, in seconds."""
    ttfts = [each.ttft_s for each in taken]
    return median(ttfts), quantiles(ttfts, n=100, method="inclusive")[98]


NOTES = (
    "All clusters run on one Ray with one thread per worker; one request at a time, the others idle.",
    f"The device of a worker that computes holds {DEVICE_BLOCKS} blocks: about two sessions. Tokens are random.",
)
