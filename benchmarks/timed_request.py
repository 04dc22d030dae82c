"""Sends one request and records when the client received each token."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from cluster.events import Completed
from cluster.frontend.text import TextDelta
from diptych.client import AsyncClient

FIRST_ID, LAST_ID = 1000, 40_000  # ordinary tokens of the measured model's vocabulary


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Arrival times of an answer's tokens, in seconds since the request was sent. At least three."""

    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def second_s(self) -> float:
        """From the first token to the second: the gap that a KV handoff may extend."""
        return self.token_s[1] - self.token_s[0]

    @property
    def step_s(self) -> float:
        """A steady decode step: the median gap after the second token."""
        return median(later - sooner for sooner, later in zip(self.token_s[1:], self.token_s[2:], strict=False))

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


@dataclass(frozen=True, slots=True)
class AnswerTiming:
    """An answer's tokens, their times, and the server's report."""

    tokens: tuple[int, ...]
    times: TokenTimes
    completed: Completed
    messages: int  # deltas; fewer than tokens when some arrived together

    def ledger_s(self, phase: str) -> float:
        """The ledger's seconds of a phase, before and after the first token."""
        ledger = self.completed.ledger
        return sum(ns for name, ns in ledger.first + ledger.rest if name == phase) / 1e9


def random_prompt(source: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Random token ids, so that no block is in a prefix cache."""
    return tuple(source.choices(range(FIRST_ID, LAST_ID), k=num_tokens))


async def send_request(
    client: AsyncClient,
    prompt: Sequence[int],
    num_tokens: int,
    timeout_s: float = 300.0,
    on_first: Callable[[], object] = lambda: None,
) -> AnswerTiming:
    """Generate exactly `num_tokens` greedy tokens; `on_first` is called at the first one. Raises `DiptychError`."""
    tokens: list[int] = []
    token_s: list[float] = []
    completed: Completed | None = None
    messages = 0
    begun = time.perf_counter()
    options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    async for event in client.generate(prompt, timeout_s=timeout_s, **options):  # type: ignore[arg-type]
        if isinstance(event, TextDelta) and event.tokens:
            if not tokens:
                on_first()
            messages += 1
            tokens += event.tokens
            token_s += [time.perf_counter() - begun] * len(event.tokens)
        elif isinstance(event, Completed):
            completed = event
    assert completed is not None and len(token_s) == num_tokens, f"{len(token_s)} tokens instead of {num_tokens}"
    return AnswerTiming(tuple(tokens), TokenTimes(tuple(token_s)), completed, messages)
