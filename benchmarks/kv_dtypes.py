"""KV in float32, bfloat16 and int8: agreement of answers, bytes, and times, each from a split cluster of that dtype.

float32 answers first, greedily. The others answer the same prompts, and score prompt and answer of float32: so a token
that differs does not change what is compared after it.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.hosted import Hosted, hosted, split_spec
from benchmarks.timed_request import AnswerTiming, random_prompt, send_request
from cluster.frontend.text import TextDelta
from cluster.spec import ClusterSpec, Resources
from diptych.client import AsyncClient
from diptych.events import TokenLogprobs

ROUNDS = 5
DTYPES = ("float32", "bfloat16", "int8")
EXACT = DTYPES[0]
PROMPT, QUICK_PROMPT = 1500, 100  # tokens, random
TIMED, QUICK_TIMED = 32, 8
ANSWER, QUICK_ANSWER = 96, 8
PROMPTS = (
    "The history of the printing press begins in",
    "To make bread at home, you first need to",
    "The main difference between a virus and a bacterium is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village near the sea, there lived",
    "Question: What is the capital of Australia?\nAnswer:",
    "The three laws of thermodynamics state that",
    "In 1969, the first people landed on the Moon.",
    "A good way to learn a new language is to",
    "SELECT name, price FROM products WHERE",
    "Photosynthesis is the process by which",
    "Dear Professor, I am writing to you because",
)
QUALITY, SIZES, TIMES = "Answers, beside float32", "KV of a prompt that moves", "Times of a request, one at a time"


@dataclass(frozen=True, slots=True)
class Text:
    """A greedy answer's tokens, and how float32's answer to the same prompt was scored, prompt included."""

    answer: tuple[int, ...]
    scores: tuple[TokenLogprobs, ...]


Texts = dict[str, list[Text]]  # by dtype, one for each prompt
Samples = dict[str, list[AnswerTiming]]  # by dtype, one for each round


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` or `DiptychError`."""
    with hosted(list(_specs())) as clusters:
        texts, samples = asyncio.run(_measured(clusters, rounds, quick, progress))
    return BenchmarkPart("kv-dtypes", (*quality(texts), *figures(samples)), claims(texts, samples), NOTES)


def _specs() -> Iterator[ClusterSpec]:
    for dtype in DTYPES:
        spec = split_spec(dtype)
        share = Resources(cpu=1 / len(DTYPES))
        pools = tuple(replace(pool, engine=replace(pool.engine, dtype=dtype), resources=share) for pool in spec.pools)
        yield replace(spec, pools=pools)


async def _measured(clusters: Hosted, rounds: int, quick: bool, progress: Progress) -> tuple[Texts, Samples]:
    texts: Texts = defaultdict(list)
    samples: Samples = defaultdict(list)
    clients = {dtype: AsyncClient(clusters.endpoints[dtype]) for dtype in DTYPES}
    try:
        for client in clients.values():
            await client.wait_ready(60.0)
        for prompt in PROMPTS[:2] if quick else PROMPTS:
            exact: TextDelta | None = None
            for dtype, client in clients.items():
                answer = await _delta(client, prompt, QUICK_ANSWER if quick else ANSWER)
                exact = exact or answer
                scored = await _delta(client, prompt + exact.text, 1)
                texts[dtype].append(Text(answer.tokens, scored.prompt_logprobs))
            progress(f"prompt {len(texts[EXACT])} of {len(PROMPTS)}")
        draw = random.Random(0)
        length, num_tokens = (QUICK_PROMPT, QUICK_TIMED) if quick else (PROMPT, TIMED)
        for number in range(rounds):
            prompt_tokens = random_prompt(draw, length)
            for dtype in DTYPES if number % 2 else reversed(DTYPES):
                samples[dtype].append(await send_request(clients[dtype], prompt_tokens, num_tokens))
            progress(f"round {number + 1} of {rounds}")
    finally:
        for client in clients.values():
            await client.close()
    return texts, samples


async def _delta(client: AsyncClient, prompt: str, num_tokens: int) -> TextDelta:
    options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 1}
    events = [event async for event in client.generate(prompt, **options)]  # type: ignore[arg-type]
    return TextDelta.join(event for event in events if isinstance(event, TextDelta))


def same_start(one: Sequence[int], other: Sequence[int]) -> float:
    """The share of tokens before the first that differs."""
    same = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return same / len(one)


def agreement(texts: Texts, dtype: str) -> tuple[float, list[float]]:
    """The share of tokens whose likeliest token is that of float32, and the differences of each one's logprob."""
    pairs = [
        pair
        for text, exact in zip(texts[dtype], texts[EXACT], strict=True)
        for pair in zip(text.scores, exact.scores, strict=True)
    ]
    same = sum(ours.top[0][0] == theirs.top[0][0] for ours, theirs in pairs)
    return same / len(pairs), [abs(ours.chosen - theirs.chosen) for ours, theirs in pairs]


def quality(texts: Texts) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for dtype in DTYPES[1:]:
        starts = [same_start(text.answer, exact.answer) for text, exact in zip(texts[dtype], texts[EXACT], strict=True)]
        share, differences = agreement(texts, dtype)
        made.append(Figure(QUALITY, dtype, "equal greedy answers", "%", spread([starts.count(1.0) / len(starts)])))
        made.append(Figure(QUALITY, dtype, "tokens before the first other one", "%", spread(starts)))
        made.append(Figure(QUALITY, dtype, "same likeliest token", "%", spread([share])))
        made.append(Figure(QUALITY, dtype, "logprob differs by", "nat", spread(differences)))
    return tuple(made)


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for dtype in DTYPES:
        moved = [sum(each.num_bytes for each in sample.completed.transfers) for sample in samples[dtype]]
        made.append(Figure(SIZES, dtype, "moved", "MiB", spread(moved)))
        exact = [sum(each.num_bytes for each in sample.completed.transfers) for sample in samples[EXACT]]
        made.append(Figure(SIZES, dtype, "of float32", "%", ratios(moved, exact)))
        for column, times in (("TTFT", _ttft_s(samples[dtype])), ("TPOT", _tpot_s(samples[dtype]))):
            made.append(Figure(TIMES, dtype, column, "ms", spread(times)))
        made.append(
            Figure(TIMES, dtype, "TTFT of float32", "x", ratios(_ttft_s(samples[dtype]), _ttft_s(samples[EXACT])))
        )
        made.append(
            Figure(TIMES, dtype, "TPOT of float32", "x", ratios(_tpot_s(samples[dtype]), _tpot_s(samples[EXACT])))
        )
    return tuple(made)


def _ttft_s(samples: Sequence[AnswerTiming]) -> list[float]:
    return [each.times.ttft_s for each in samples]


def _tpot_s(samples: Sequence[AnswerTiming]) -> list[float]:
    """Without the first gap, in which KV moves."""
    return [each.times.step_s for each in samples]


def claims(texts: Texts, samples: Samples) -> tuple[BenchmarkClaim, ...]:
    share, _ = agreement(texts, "int8")
    moved = ratios(
        *(
            [sum(each.num_bytes for each in one.completed.transfers) for one in samples[dtype]]
            for dtype in ("int8", EXACT)
        )
    )
    tpot = ratios(_tpot_s(samples["int8"]), _tpot_s(samples[EXACT])).median
    ttft = ratios(_ttft_s(samples["int8"]), _ttft_s(samples[EXACT])).median
    return (
        BenchmarkClaim("int8: same likeliest token as float32", share, 0.97, "%", at_least=True),
        BenchmarkClaim("int8: bytes moved, of float32", moved.median, 0.27, "%"),
        BenchmarkClaim("int8: TTFT, of float32", ttft, 1.05, "x"),
        BenchmarkClaim("int8: TPOT, of float32", tpot, 1.05, "x"),
    )


NOTES = (
    "The clusters run on one Ray with one thread per worker, and are asked in turns; the other ones idle.",
    f"Answers of {ANSWER} tokens to {len(PROMPTS)} prompts of a few words. Times: prompts of {PROMPT} random tokens.",
    "TPOT: the median gap after the second token.",
)
