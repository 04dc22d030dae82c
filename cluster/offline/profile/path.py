"""What a request pays outside steps, from a few requests to an idle cluster. Knows the client; knows no worker.

What a worker adds to its steps when there is somebody to tell of them: the gap between two tokens less the same step
measured alone.
"""

import asyncio
import random
from dataclasses import dataclass
from statistics import median

from cluster.events import Completed
from cluster.frontend.text import TextDelta
from cluster.offline.profile.steps import measured
from diptych.client import AsyncClient
from diptych.shapes import Shape
from workers.profiles.profile_errors import ProfileError

FIRST_TOKEN = 3  # the tokens below often end a text
PROMPT_TOKENS, ANSWER_TOKENS = 64, 48
LONE, TOGETHER, CROWDS = 5, 8, 2  # lone requests; requests at once, and how often
STEPS = 24
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Path:
    """`door_s`: the first token's way beyond the ledger. `lone_s`: the ledger's phases to the first token, medians.

    `gap_s` is added to a step of one decode, and `gap_row_s` more for each beyond the first.
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


async def measure_path(client: AsyncClient, decoder: str, vocab_size: int, seed: int = 0) -> Path:
    """`decoder`: a worker that decodes; those of its pool are alike.

    Raises `DiptychError`, also when requests do not end in time, and `ProfileError` when other requests are in the way.
    """
    draw = random.Random(seed)
    await _asked(client, draw, vocab_size, 1)  # what the first request has to build is no one else's
    alone = [await _asked(client, draw, vocab_size, 1) for _ in range(LONE)]
    step_s, crowd_step_s = await _step_s(client, decoder, 1), await _step_s(client, decoder, TOGETHER)
    gap_s = crowd_s = max(0.0, median(map(_token_gap_s, alone)) - step_s) if step_s is not None else 0.0
    if crowd_step_s is not None:
        together = [await _asked(client, draw, vocab_size, TOGETHER) for _ in range(CROWDS)]
        crowd_s = median(map(_token_gap_s, together)) - crowd_step_s
    phases: dict[str, list[float]] = {}
    for (answer,) in alone:
        for phase, ns in answer.completed.ledger.first:
            phases.setdefault(phase, []).append(ns / 1e9)
    return Path(
        door_s=max(0.0, median(answer.door_s for (answer,) in alone)),
        gap_s=gap_s,
        gap_row_s=max(0.0, crowd_s - gap_s) / (TOGETHER - 1),
        kv_token_bytes=_token_bytes(alone[0][0].completed),
        lone_s={phase: median(took) for phase, took in phases.items()},
    )


async def _asked(client: AsyncClient, draw: random.Random, vocab_size: int, count: int) -> list[_Answer]:
    """So many answers at once. The first error ends them all."""
    prompts = [draw.choices(range(FIRST_TOKEN, vocab_size), k=PROMPT_TOKENS) for _ in range(count)]
    try:
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(_ask(client, prompt)) for prompt in prompts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in asking]


def _token_gap_s(answers: list[_Answer]) -> float:
    """The mean time between two tokens while all answers were under way: several may come at once."""
    begin_s = max(answer.token_s[1] for answer in answers)
    end_s = min(answer.token_s[-1] for answer in answers)
    within = [[at_s for at_s in answer.token_s if begin_s <= at_s <= end_s] for answer in answers]
    gaps = sum(len(times) - 1 for times in within if times)
    if gaps < 1:
        raise ProfileError(f"{len(answers)} answers were never under way together; is the cluster busy?")
    return sum(times[-1] - times[0] for times in within if times) / gaps


async def _step_s(client: AsyncClient, decoder: str, batch: int) -> float | None:
    """The same step without anybody to tell of it; None when the worker takes no such step."""
    timings = await measured(client, decoder, Shape((), batch, PROMPT_TOKENS + ANSWER_TOKENS // 2), STEPS)
    return median(timings.seconds) if timings is not None and timings.seconds else None


async def _ask(client: AsyncClient, prompt: list[int]) -> _Answer:
    clock = asyncio.get_running_loop()
    asked_s = clock.time()
    token_s: list[float] = []
    completed: Completed | None = None
    answer = client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S)
    async for event in answer:
        if isinstance(event, TextDelta):
            token_s += [clock.time()] * len(event.tokens)
        elif isinstance(event, Completed):
            completed = event
    assert completed is not None and len(token_s) == ANSWER_TOKENS, "a stream that ends well has all its tokens"
    return _Answer(asked_s, tuple(token_s), completed)


def _token_bytes(completed: Completed) -> int:
    """Of KV: a transfer moves whole blocks, so the number of tokens in a block is the power of two that fits."""
    for report in completed.transfers:
        if report.num_blocks:
            block_tokens = 1
            while -(-PROMPT_TOKENS // block_tokens) > report.num_blocks:
                block_tokens *= 2
            return report.num_bytes // report.num_blocks // block_tokens
    return 0
