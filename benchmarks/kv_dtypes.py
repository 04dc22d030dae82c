"""KV in float32 and in narrower dtypes: agreement of answers, bytes and times, each from a split cluster of that dtype.

All answer the same prompts greedily, and then score float32's answers: a token that differs does not change what is
compared after it.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, Spread, ratios, spread
from benchmarks.hosted import Hosted, hosted, split_spec
from benchmarks.timed_request import AnswerTiming, random_prompt, send_request
from cluster.frontend.text import TextDelta
from cluster.spec import ClusterSpec, Resources
from diptych.client import AsyncClient
from diptych.events import TokenLogprobs

ROUNDS = 3
DTYPES = ("float32", "bfloat16", "int8", "fp8")
EXACT = DTYPES[0]
PROMPT, QUICK_PROMPT = 1500, 100  # tokens, random
TIMED, QUICK_TIMED = 24, 8
ANSWER, QUICK_ANSWER = 64, 8
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
QUALITY, REQUEST = "Answers, beside float32", "A request, one at a time"
COLUMNS: dict[str, tuple[str, Callable[[AnswerTiming], float]]] = {
    "KV moved": ("MiB", lambda each: sum(report.num_bytes for report in each.completed.transfers)),
    "TTFT": ("ms", lambda each: each.times.ttft_s),
    "TPOT": ("ms", lambda each: each.times.step_s),
}
MOST = {"KV moved": 0.27, "TTFT": 1.05, "TPOT": 1.05}
MIN_AGREEMENT = {"int8": 0.97, "fp8": 0.94}


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
    texts: Texts = {}
    samples: Samples = defaultdict(list)
    clients = {dtype: AsyncClient(clusters.endpoints[dtype]) for dtype in DTYPES}
    try:
        for client in clients.values():
            await client.wait_ready(60.0)
        num_tokens, exact = QUICK_ANSWER if quick else ANSWER, list[str]()
        for dtype, client in clients.items():
            answers = await asyncio.gather(*(_delta(client, prompt, num_tokens) for prompt in PROMPTS))
            exact = exact or [prompt + answer.text for prompt, answer in zip(PROMPTS, answers, strict=True)]
            scored = await asyncio.gather(*(_delta(client, text, 1) for text in exact))
            pairs = zip(answers, scored, strict=True)
            texts[dtype] = [Text(answer.tokens, score.prompt_logprobs) for answer, score in pairs]
            progress(f"answers in {dtype}")
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
        for column, (unit, value) in COLUMNS.items():
            made.append(Figure(REQUEST, dtype, column, unit, spread(map(value, samples[dtype]))))
            made.append(Figure(REQUEST, dtype, f"{column} of float32's", "x", beside_exact(samples, dtype, column)))
    return tuple(made)


def beside_exact(samples: Samples, dtype: str, column: str) -> Spread:
    _, value = COLUMNS[column]
    return ratios(*(list(map(value, samples[each])) for each in (dtype, EXACT)))


def claims(texts: Texts, samples: Samples) -> tuple[BenchmarkClaim, ...]:
    made: list[BenchmarkClaim] = []
    for dtype, least in MIN_AGREEMENT.items():
        share, _ = agreement(texts, dtype)
        made.append(BenchmarkClaim(f"{dtype}: same likeliest token as float32", share, least, "%", at_least=True))
        for column, most in MOST.items():
            median = beside_exact(samples, dtype, column).median
            made.append(BenchmarkClaim(f"{dtype}: {column} of float32's", median, most, "x"))
    return tuple(made)


NOTES = (
    "The clusters run on one Ray with one thread per worker, and are asked in turns; the other ones idle.",
    f"Answers of {ANSWER} tokens to {len(PROMPTS)} prompts of a few words. Times: prompts of {PROMPT} random tokens.",
    "TPOT: the median gap after the second token.",
)
