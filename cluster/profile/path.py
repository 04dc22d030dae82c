"""What a request pays outside steps, from a few requests to an idle cluster. Knows the client; knows no worker.

A worker's time between two steps is the gap between two tokens less the step that made the later one.
"""

import asyncio
import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from cluster.api.client import DiptychClient
from cluster.events import Completed
from cluster.text import TextDelta
from cluster.view import ClusterView
from workers.profiles.errors import ProfileError

FIRST_TOKEN = 3  # the tokens below often end a text
PROMPT_TOKENS, ANSWER_TOKENS = 64, 32
LONE, TOGETHER = 5, 8  # requests
WINDOW = 8  # tokens: as far as a worker's average of its steps reaches back
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Path:
    """`door_s`: the first token's way beyond the ledger. `lone_s`: the ledger's phases to the first token, medians.

    `gap_s` passes between two steps of a worker that decodes, and `gap_row_s` more for each sequence beyond the first.
    """

    door_s: float
    gap_s: float
    gap_row_s: float
    kv_token_bytes: int
    lone_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Answer:
    asked_s: float
    token_s: tuple[float, ...]
    completed: Completed

    @property
    def door_s(self) -> float:
        return self.token_s[0] - self.asked_s - self.completed.ledger.ttft_ns / 1e9


async def measure_path(client: DiptychClient, decoder: str, vocab_size: int, seed: int = 0) -> Path:
    """`decoder`: a worker that decodes; those of its pool are alike.

    Raises `DiptychError`, and `ProfileError` when requests do not end in time.
    """
    draw = random.Random(seed)

    def prompt() -> list[int]:
        return draw.choices(range(FIRST_TOKEN, vocab_size), k=PROMPT_TOKENS)

    await _ask(client, prompt(), asyncio.Event())  # what the first request has to build is no one else's
    alone = [await _watched(client, decoder, [prompt()]) for _ in range(LONE)]
    together = [await _watched(client, decoder, [prompt() for _ in range(TOGETHER)]) for _ in range(2)]
    answers = [answer for group, _ in alone for answer in group]
    gap_s = max(0.0, median(gap for _, gap in alone))
    more_s = max(0.0, median(gap for _, gap in together) - gap_s)
    phases: dict[str, list[float]] = {}
    for answer in answers:
        for phase, ns in answer.completed.ledger.first:
            phases.setdefault(phase, []).append(ns / 1e9)
    return Path(
        door_s=max(0.0, median(answer.door_s for answer in answers)),
        gap_s=gap_s,
        gap_row_s=more_s / (TOGETHER - 1),
        kv_token_bytes=_token_bytes(answers[0].completed),
        lone_s={phase: median(took) for phase, took in phases.items()},
    )


async def _watched(client: DiptychClient, decoder: str, prompts: list[list[int]]) -> tuple[list[_Answer], float]:
    """The answers, and the gap: what lies between tokens beside the decoder's steps, when all answers are under way."""
    halfway = [asyncio.Event() for _ in prompts]
    asked = [asyncio.ensure_future(_ask(client, each, event)) for each, event in zip(prompts, halfway, strict=True)]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for event in halfway:
                await event.wait()
            view = (await client.status()).view
            seen_s = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*asked)
    except TimeoutError:
        raise ProfileError(f"requests did not end within {TIMEOUT_S:.0f} s; is the cluster busy?") from None
    finally:
        for each in asked:
            each.cancel()
    gaps = []
    for answer in answers:
        before = [at_s for at_s in answer.token_s[1:] if at_s <= seen_s][-WINDOW - 1 :]
        gaps += [later - sooner for sooner, later in pairwise(before)]
    return answers, median(gaps) - _step_s(view, decoder) if gaps else 0.0


async def _ask(client: DiptychClient, prompt: list[int], halfway: asyncio.Event) -> _Answer:
    clock = asyncio.get_running_loop()
    asked_s, token_s = clock.time(), []
    completed: Completed | None = None
    answer = client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S)
    try:
        async for event in answer:
            if isinstance(event, TextDelta):
                token_s += [clock.time()] * len(event.tokens)
                if len(token_s) > ANSWER_TOKENS // 2:
                    halfway.set()
            elif isinstance(event, Completed):
                completed = event
    finally:
        halfway.set()  # nobody shall wait for an answer that failed
    assert completed is not None and token_s, "a stream that ends well has tokens and an end"
    return _Answer(asked_s, tuple(token_s), completed)


def _step_s(view: ClusterView, worker: str) -> float:
    return next((each.stats.step_s for each in view.workers if each.name == worker), 0.0)


def _token_bytes(completed: Completed) -> int:
    """Of KV: a transfer moves whole blocks, so the number of tokens in a block is the power of two that fits."""
    for report in completed.transfers:
        if report.num_blocks:
            block_tokens = 1
            while -(-PROMPT_TOKENS // block_tokens) > report.num_blocks:
                block_tokens *= 2
            return report.num_bytes // report.num_blocks // block_tokens
    return 0
