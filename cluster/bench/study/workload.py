"""What is asked and when: five mixes of lengths, Poisson arrivals, all from seeds. Knows no engine and no machine.

A prompt above 512 tokens and an answer above 128 are long; the borders are TetriInfer's (Hu et al., 2024). Lengths are
log-normal between their borders. The same seed gives the same lengths and the same order at every rate.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from workers.request import Request, SamplingParams

FIRST_TOKEN, LAST_TOKEN = 1000, 40_000  # ordinary tokens of the measured model's vocabulary


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal with this median, drawn again until it lies between `least` and `most`."""

    median: int
    sigma: float
    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        while True:
            drawn = round(self.median * math.exp(source.gauss(0.0, self.sigma)))
            if self.least <= drawn <= self.most:
                return drawn


SHORT_PROMPT, LONG_PROMPT = Lengths(128, 0.7, 16, 512), Lengths(1024, 0.4, 513, 2048)
SHORT_ANSWER, LONG_ANSWER = Lengths(32, 0.7, 4, 128), Lengths(256, 0.4, 129, 512)
LONGEST_ANSWER = LONG_ANSWER.most
_PURE = {
    "short/short": (SHORT_PROMPT, SHORT_ANSWER),
    "short/long": (SHORT_PROMPT, LONG_ANSWER),
    "long/short": (LONG_PROMPT, SHORT_ANSWER),
    "long/long": (LONG_PROMPT, LONG_ANSWER),
}
# prompt/answer -> what a request is drawn from
MIXES = {name: (lengths,) for name, lengths in _PURE.items()} | {"mixed": tuple(_PURE.values())}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it comes, and how many tokens it has and gets."""

    key: str
    at_s: float
    prompt_tokens: int
    answer_tokens: int

    @property
    def request_key(self) -> str:
        """Under which the engine tells of it."""
        return f"{self.key}/0"

    def request(self, told: int | None = None) -> Request:
        """`told`: the longest answer as the engine is told, when that is not the true length: an end token ends it."""
        source = random.Random(self.key)
        prompt = tuple(source.choices(range(FIRST_TOKEN, LAST_TOKEN), k=self.prompt_tokens))
        most = told or self.answer_tokens
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=most, ignore_eos=told is None)
        return Request(self.key, prompt, sampling, reply_to="study")


def asked(mix: str, count: int, seed: int, rate: float | None) -> tuple[Asked, ...]:
    """`count` requests, `rate` a second from time 0 on; rate None: all of them are there at time 0."""
    lengths, gaps = random.Random(f"{mix}, lengths, {seed}"), random.Random(f"{mix}, gaps, {seed}")
    made = []
    at_s = 0.0
    for number in range(count):
        prompt, answer = lengths.choice(MIXES[mix])
        made.append(Asked(f"{mix}-{seed}-{number}", at_s, prompt.draw(lengths), answer.draw(lengths)))
        at_s += gaps.expovariate(rate) if rate is not None else 0.0
    return tuple(made)


def mean_lengths(requests: Sequence[Asked]) -> tuple[float, float]:
    """Of prompt and answer."""
    prompts, answers = (sum(each.prompt_tokens for each in requests), sum(each.answer_tokens for each in requests))
    return prompts / len(requests), answers / len(requests)
