"""The first token of a conversation's later turns, with and without the KV that its decode worker computed.

    turn 1   prompt ──────────────────────> answer
    turn 2   prompt, answer, question ────> answer       the prefill worker has the prompt, the decode worker all
    turn 3   the same, one turn longer

Without: the decode worker caches nothing (`engine.prefix_caching: false`), so the last answer is computed again. On the
host: other conversations come between two turns, and the decode worker's device does not hold them all.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from benchmarks.hosted import Hosted, hosted, split_spec
from benchmarks.timed_request import AnswerTiming, random_prompt, send_request
from cluster.spec import ClusterSpec
from diptych.client import AsyncClient
from workers.config import ByteSize, CacheConfig

ROUNDS = 1
SESSIONS = 4
NUM_TURNS, QUICK_TURNS = 3, 2
PROMPT, ANSWER, QUESTION = 400, 120, 40  # tokens; a router sees an answer only if it crosses a multiple of 128
LAST_ANSWER = 8  # nobody reads it
FIRST_S = 60.0
PAUSE_S = 1.0  # between turns: longer than cache events take to arrive
SYSTEMS = ("reuse", "without")
GROUPS = 3  # of conversations, one after the other, on the host
HOST = CacheConfig(ByteSize(1 << 30))
TITLE = f"Conversations: prompts of {PROMPT} tokens, answers of {ANSWER}, questions of {QUESTION}"


@dataclass(frozen=True, slots=True)
class TurnSample:
    """A turn's TTFT in seconds, and tokens of its prompt: all of them, and those that were cached."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


Samples = dict[tuple[int, str], list[TurnSample]]  # (turn, system)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` or `DiptychError`."""
    return _measured("turns", list(_specs()), 1, rounds, quick, progress)


def measure_host(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """The same with the answers in the decode worker's host memory alone."""
    specs = []
    for spec in _specs():
        prefill, decode = spec.pools
        prefill = replace(prefill, engine=replace(prefill.engine, kv_blocks=768))
        cache = HOST if decode.engine.prefix_caching else decode.cache
        decode = replace(decode, engine=replace(decode.engine, kv_blocks=260), cache=cache)
        specs.append(replace(spec, pools=(prefill, decode)))
    return _measured("turns-host", specs, GROUPS, rounds, quick, progress)


def _measured(
    name: str, specs: list[ClusterSpec], groups: int, rounds: int, quick: bool, progress: Progress
) -> BenchmarkPart:
    with hosted(specs) as clusters:
        samples = asyncio.run(_rounds(clusters, QUICK_TURNS if quick else NUM_TURNS, groups, rounds, progress))
    made = claims(samples, min if groups == 1 else median)  # a device that gives way may lose some
    return BenchmarkPart(name, figures(samples), made, NOTES)


def _specs() -> Iterator[ClusterSpec]:
    for name in SYSTEMS:
        spec = split_spec(name)
        prefill, decode = spec.pools
        engine = replace(decode.engine, prefix_caching=name == "reuse")
        gateway = replace(spec.gateway, routing="slo")
        yield replace(spec, pools=(prefill, replace(decode, engine=engine)), gateway=gateway)


async def _rounds(clusters: Hosted, num_turns: int, groups: int, rounds: int, progress: Progress) -> Samples:
    samples: Samples = defaultdict(list)
    draw = random.Random(0)
    async with (
        AsyncClient(clusters.endpoints["reuse"]) as reuse,
        AsyncClient(clusters.endpoints["without"]) as without,
    ):
        clients = dict(zip(SYSTEMS, (reuse, without), strict=True))
        for client in clients.values():
            await client.wait_ready(60.0)
            await send_request(client, random_prompt(draw, PROMPT), 12)  # warm up
        for number in range(rounds):
            talks = {name: [random_prompt(draw, PROMPT) for _ in range(groups * SESSIONS)] for name in SYSTEMS}
            for turn in range(1, num_turns + 1):
                for name in SYSTEMS if (number + turn) % 2 else reversed(SYSTEMS):
                    num_tokens = ANSWER if turn < num_turns else LAST_ANSWER
                    answers = []
                    for first in range(0, len(talks[name]), SESSIONS):
                        group = talks[name][first : first + SESSIONS]
                        answers += await _turn(clients[name], group, num_tokens, samples[turn, name])
                    talks[name] = [(*each, *random_prompt(draw, QUESTION)) for each in answers]
                progress(f"round {number + 1} of {rounds}: turn {turn}")
                await asyncio.sleep(PAUSE_S)
    return samples


async def _turn(
    client: AsyncClient, prompts: Sequence[tuple[int, ...]], num_tokens: int, samples: list[TurnSample]
) -> list[tuple[int, ...]]:
    """The conversations with the answers to these prompts. Each is sent when the one before has its first token."""
    asked: list[asyncio.Task[AnswerTiming]] = []
    for prompt in prompts:
        first = asyncio.Event()
        asked.append(asyncio.create_task(send_request(client, prompt, num_tokens, on_first=first.set)))
        async with asyncio.timeout(FIRST_S):
            await first.wait()
    answers = await asyncio.gather(*asked)
    for prompt, answer in zip(prompts, answers, strict=True):
        samples.append(TurnSample(answer.times.ttft_s, len(prompt), answer.completed.cached_tokens))
    return [(*prompt, *answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for (turn, name), taken in sorted(samples.items()):
        row = f"turn {turn}, {taken[0].prompt_tokens} tokens"
        made.append(Figure(TITLE, row, f"TTFT {name}", "ms", spread(each.ttft_s for each in taken)))
        made.append(Figure(TITLE, row, f"cached {name}", "n", spread(each.cached_tokens for each in taken)))
    return tuple(made)


def claims(samples: Samples, least: Callable[[Iterable[int]], float] = min) -> tuple[BenchmarkClaim, ...]:
    """Two for each later turn: it finds the last turn's tokens, up to one block, and its first token comes sooner.

    `least`: which of its conversations must find them.
    """
    made: list[BenchmarkClaim] = []
    block = split_spec().pools[0].engine.block_size
    for turn in sorted({turn for turn, _ in samples if turn > 1}):
        reuse, without = (samples[turn, name] for name in SYSTEMS)
        tokens = reuse[0].prompt_tokens
        found = least(each.cached_tokens for each in reuse)
        what = f"turn {turn}: cached tokens, of {tokens}"
        made.append(BenchmarkClaim(what, found, tokens - QUESTION - block, "n", at_least=True))
        ttft_s, bound_s = (median(each.ttft_s for each in taken) for taken in (reuse, without))
        made.append(BenchmarkClaim(f"turn {turn}: TTFT with reuse (without)", ttft_s, bound_s, "ms"))
    return tuple(made)


NOTES = (
    "Both clusters run on one Ray with one thread per worker, and are measured in turns; the other one idles.",
    f"{SESSIONS} conversations at a time; one prompt after another, beside the answers before it. Tokens are random.",
    f"On the host: {GROUPS} such groups, one after the other in each turn.",
    f"Answers of the last turn have {LAST_ANSWER} tokens.",
)
