"""The study's requests: five mixes of lengths, Poisson arrivals, seeded.

A seed gives the same lengths in the same order at every rate.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.offline.workload.changes import synthetic
from cluster.offline.workload.lengths import KINDS, LONG_ANSWER, LengthMix
from cluster.offline.workload.processes import burst, poisson
from workers.request import Request, SamplingParams

FIRST_TOKEN, LAST_TOKEN = 1000, 40_000  # ordinary tokens of the measured model's vocabulary

MIXES = KINDS
LONGEST_ANSWER = LONG_ANSWER.most


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """One request: its arrival and its lengths."""

    key: str
    at_s: float
    prompt_tokens: int
    answer_tokens: int

    @property
    def request_key(self) -> str:
        """The engine's key of it."""
        return f"{self.key}/0"

    def request(self, max_tokens: int | None = None) -> Request:
        """`max_tokens`: a limit above the true length; then an end token ends the answer."""
        source = random.Random(self.key)
        prompt = tuple(source.choices(range(FIRST_TOKEN, LAST_TOKEN), k=self.prompt_tokens))
        most = max_tokens or self.answer_tokens
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=most, ignore_eos=max_tokens is None)
        return Request(self.key, prompt, sampling, reply_to="study")


def study_requests(mix: str, count: int, seed: int, rate: float | None) -> tuple[StudyRequest, ...]:
    """`count` requests, `rate` per second from time 0 on; rate None: all arrive at time 0."""
    process = burst() if rate is None else poisson(rate)
    made = synthetic(mix, process, LengthMix(MIXES[mix]), key=mix, seed=seed, count=count).arrivals
    return tuple(
        StudyRequest(f"{mix}-{seed}-{number}", each.at_s, each.prompt_tokens, each.output_tokens)
        for number, each in enumerate(made)
    )


def mean_lengths(requests: Sequence[StudyRequest]) -> tuple[float, float]:
    """Mean prompt and answer lengths, in tokens."""
    prompts, answers = (sum(each.prompt_tokens for each in requests), sum(each.answer_tokens for each in requests))
    return prompts / len(requests), answers / len(requests)
