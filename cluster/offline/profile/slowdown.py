"""How much workers on one machine slow each other down, since they share memory, caches and cores.

A prefill worker is measured beside a decode worker that answers requests, so that the work of sending tokens counts;
any other two are measured beside each other's steps, mixed workers in both phases. Knows the client; knows no engine.
"""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median

from cluster.offline.profile.overhead import PROMPT_TOKENS, TimedAnswer, mean_gap_s, random_prompt, stream_answer
from cluster.offline.profile.steps import DECODE_LOAD, MAX_REPEATS, PREFILL_LOAD, measured
from cluster.spec import Role
from diptych.client import AsyncClient
from diptych.shapes import Shape
from diptych.view import WorkerView
from workers.profiles.measured import Interference
from workers.profiles.profile_errors import ProfileError
from workers.request import MOST_REPEATS as REPEATS_LIMIT

ANSWERS, ANSWER_TOKENS = 4, 240
BESIDE_S = 4.0
FIRST_TOKENS, BASELINE_TOKENS = 8, 48  # of each answer: while others start; and before the prefill worker starts


async def measure_slowdown(
    client: AsyncClient, one: WorkerView, other: WorkerView, linked: bool, vocab_size: int
) -> list[Interference]:
    """The factors by which steps of each take longer while the other computes. `linked`: KV goes from one to the other.

    Raises `DiptychError`, and `ProfileError` when the cluster is busy.
    """
    answer_tokens = min(ANSWER_TOKENS, other.capacity_tokens - PROMPT_TOKENS)
    if linked and one.role is Role.PREFILL and other.role is Role.DECODE and answer_tokens > 2 * BASELINE_TOKENS:
        ratio, ratio_of_other = await _beside_answers(client, one, answer_tokens, vocab_size)
        return [Interference(one.pool, other.pool, ratio), Interference(other.pool, one.pool, ratio_of_other)]
    found = []
    for phase, other_phase in product(_phases(one), _phases(other)):
        if one.pool == other.pool and phase > other_phase:
            continue  # the same two steps as the other way round
        ratio, ratio_of_other = await _beside_steps(client, (one, phase), (other, other_phase))
        found.append(Interference(one.pool, other.pool, ratio, phase, other_phase))
        found.append(Interference(other.pool, one.pool, ratio_of_other, other_phase, phase))
    return found


def _phases(worker: WorkerView) -> tuple[str, ...]:
    return ("decode", "prefill") if worker.role is Role.MIXED else (worker.role.value,)


async def _beside_answers(
    client: AsyncClient, prefill: WorkerView, num_tokens: int, vocab_size: int
) -> tuple[float, float]:
    load = await _load(client, prefill, "prefill")
    alone = await _step_seconds(client, prefill, load, MAX_REPEATS)
    source = random.Random(ANSWERS)
    answers = [TimedAnswer() for _ in range(ANSWERS)]
    ready = [asyncio.Event() for _ in answers]
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.TaskGroup() as group:
            for answer, event in zip(answers, ready, strict=True):
                prompt = random_prompt(source, vocab_size)
                group.create_task(_answer(client, prompt, num_tokens, answer, event))
            for event in ready:
                await event.wait()
            begin_s = clock()
            gap_s = mean_gap_s(answers, max(answer.token_s[FIRST_TOKENS] for answer in answers), begin_s)
            left_s = gap_s * (num_tokens - max(len(answer.token_s) for answer in answers))
            repeats = max(1, min(REPEATS_LIMIT, int(left_s / 2 / median(alone))))
            beside = await _step_seconds(client, prefill, load, repeats)
            slower = mean_gap_s(answers, begin_s, clock()) / gap_s
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    after = await _step_seconds(client, prefill, load, MAX_REPEATS)
    return max(1.0, median(beside) / median((*alone, *after))), max(1.0, slower)  # below 1 is noise


async def _answer(
    client: AsyncClient, prompt: list[int], num_tokens: int, answer: TimedAnswer, ready: asyncio.Event
) -> None:
    """Set `ready` after `BASELINE_TOKENS`, or when the stream ends or fails."""

    def on_tokens() -> None:
        if len(answer.token_s) > BASELINE_TOKENS:
            ready.set()

    try:
        await stream_answer(client, prompt, num_tokens, answer, on_tokens)
    finally:
        ready.set()


async def _beside_steps(client: AsyncClient, *both: tuple[WorkerView, str]) -> tuple[float, float]:
    """Of two workers, each in a phase, whose steps run side by side for about `BESIDE_S`."""
    loads = [await _load(client, *each) for each in both]
    steps = [partial(_step_seconds, client, worker, load) for (worker, _), load in zip(both, loads, strict=True)]
    before = [await seconds(MAX_REPEATS) for seconds in steps]
    counts = [max(1, min(REPEATS_LIMIT, round(BESIDE_S / max(median(alone), 1e-9)))) for alone in before]
    together = await asyncio.gather(*(seconds(count) for seconds, count in zip(steps, counts, strict=True)))
    after = [await seconds(MAX_REPEATS) for seconds in steps]
    one, other = (
        max(1.0, median(beside) / median((*sooner, *later)))  # below 1 is noise
        for beside, sooner, later in zip(together, before, after, strict=True)
    )
    return one, other


async def _step_seconds(client: AsyncClient, worker: WorkerView, load: Shape, repeats: int) -> Sequence[float]:
    timings = await measured(client, worker.name, load, repeats)
    if timings is None or not timings.seconds:
        raise ProfileError(f"{worker.name} got requests while it was measured; measure an idle cluster")
    return timings.seconds


async def _load(client: AsyncClient, worker: WorkerView, phase: str) -> Shape:
    """A step that a worker runs most of the time in this phase."""
    wanted = (*PREFILL_LOAD, *DECODE_LOAD) if phase == "prefill" else (*DECODE_LOAD, *PREFILL_LOAD)
    for shape in wanted:
        if await measured(client, worker.name, shape, 1):
            return shape
    raise ProfileError(f"{worker.name} takes none of the step shapes that would keep it busy")
