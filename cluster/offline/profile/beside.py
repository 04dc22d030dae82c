"""How much workers of one machine slow each other down: they share its memory, its caches, and what else runs there.

A prefill worker is measured beside a decode worker that answers requests, so that all the work for its tokens counts
too; any other two, beside each other's steps. Knows the client; knows no engine.
"""

import asyncio
import random
from collections.abc import Sequence
from statistics import median

from cluster.events import Completed
from cluster.frontend.text import TextDelta
from cluster.offline.profile.path import FIRST_TOKEN, PROMPT_TOKENS, TIMEOUT_S
from cluster.offline.profile.steps import DECODE_LOAD, MOST_REPEATS, PREFILL_LOAD, measured
from cluster.spec import Role
from diptych.client import AsyncClient
from diptych.shapes import Shape
from diptych.view import WorkerView
from workers.profiles.profile_errors import ProfileError
from workers.request import MOST_REPEATS as AS_MANY_AS_FIT

ANSWERS, ANSWER_TOKENS = 4, 240
FIRST_TOKENS, QUIET_TOKENS = 8, 48  # of each answer: while others begin; and before the neighbour does


async def measure_beside(
    client: AsyncClient, one: WorkerView, other: WorkerView, linked: bool, vocab_size: int
) -> tuple[float, float]:
    """How many times as long a step of each takes while the other computes. `linked`: KV goes from one to the other.

    Raises `DiptychError`, and `ProfileError` when there is nothing to compare.
    """
    answer_tokens = min(ANSWER_TOKENS, other.capacity_tokens - PROMPT_TOKENS)
    if linked and one.role is Role.PREFILL and other.role is Role.DECODE and answer_tokens > 2 * QUIET_TOKENS:
        return await _beside_answers(client, one, answer_tokens, vocab_size)
    return await _side_by_side(client, one, other)


async def _beside_answers(
    client: AsyncClient, prefill: WorkerView, answer_tokens: int, vocab_size: int
) -> tuple[float, float]:
    load = await _load(client, prefill)
    alone = await _timed(client, prefill, load, MOST_REPEATS)
    draw = random.Random(ANSWERS)
    told: list[list[float]] = [[] for _ in range(ANSWERS)]
    quiet = [asyncio.Event() for _ in told]
    clock = asyncio.get_running_loop()
    try:
        async with asyncio.TaskGroup() as group:
            for times, event in zip(told, quiet, strict=True):
                prompt = draw.choices(range(FIRST_TOKEN, vocab_size), k=PROMPT_TOKENS)
                group.create_task(_answer(client, prompt, answer_tokens, times, event))
            for event in quiet:
                await event.wait()
            begin_s = clock.time()
            gap_s = _gap_s(told, max(times[FIRST_TOKENS] for times in told), begin_s)
            left_s = gap_s * (answer_tokens - max(map(len, told)))
            repeats = max(1, min(AS_MANY_AS_FIT, int(left_s / 2 / median(alone))))
            beside = await _timed(client, prefill, load, repeats)
            slower = _gap_s(told, begin_s, clock.time()) / gap_s
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    after = await _timed(client, prefill, load, MOST_REPEATS)
    return max(1.0, median(beside) / median((*alone, *after))), max(1.0, slower)  # below 1 it is noise


def _gap_s(told: Sequence[Sequence[float]], begin_s: float, end_s: float) -> float:
    """The mean gap between two tokens in this time: several may come at once, when everybody is busy."""
    within = [[at_s for at_s in times if begin_s <= at_s <= end_s] for times in told]
    spans = [(times[-1] - times[0], len(times) - 1) for times in within if len(times) > 1]
    seconds, count = (sum(each) for each in zip(*spans, strict=True)) if spans else (0.0, 0)
    if not seconds:
        raise ProfileError("answers ended before their neighbour was measured; is the cluster busy?")
    return seconds / count


async def _answer(
    client: AsyncClient, prompt: list[int], num_tokens: int, times: list[float], quiet: asyncio.Event
) -> None:
    """`times` gets when each token came. `quiet` is set after some of them, or when there will be no more."""
    clock = asyncio.get_running_loop()
    try:
        answer = client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S)
        async for event in answer:
            if isinstance(event, TextDelta):
                times += [clock.time()] * len(event.tokens)
                if len(times) > QUIET_TOKENS:
                    quiet.set()
            elif isinstance(event, Completed):
                break
    finally:
        quiet.set()


async def _side_by_side(client: AsyncClient, one: WorkerView, other: WorkerView) -> tuple[float, float]:
    workers = (one, other)
    loads = [await _load(client, worker) for worker in workers]
    before = [await _timed(client, worker, load, MOST_REPEATS) for worker, load in zip(workers, loads, strict=True)]
    both = await asyncio.gather(
        *(_timed(client, worker, load, AS_MANY_AS_FIT) for worker, load in zip(workers, loads, strict=True))
    )
    after = [await _timed(client, worker, load, MOST_REPEATS) for worker, load in zip(workers, loads, strict=True)]
    ratios = [
        median(together) / median((*sooner, *later))
        for together, sooner, later in zip(both, before, after, strict=True)
    ]
    return max(1.0, ratios[0]), max(1.0, ratios[1])


async def _timed(client: AsyncClient, worker: WorkerView, load: Shape, repeats: int) -> Sequence[float]:
    timings = await measured(client, worker.name, load, repeats)
    if timings is None or not timings.seconds:
        raise ProfileError(f"{worker.name} got requests while it was measured; measure an idle cluster")
    return timings.seconds


async def _load(client: AsyncClient, worker: WorkerView) -> Shape:
    """What a worker of this role does most of the time."""
    wanted = (*PREFILL_LOAD, *DECODE_LOAD) if worker.role is Role.PREFILL else (*DECODE_LOAD, *PREFILL_LOAD)
    for shape in wanted:
        if await measured(client, worker.name, shape, 1):
            return shape
    raise ProfileError(f"{worker.name} takes none of the shapes that would keep it busy")
