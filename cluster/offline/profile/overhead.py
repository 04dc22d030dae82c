"""What a request costs outside its steps, from a few requests to an idle cluster. Knows the client, not the workers.

A worker adds time to its steps when it sends tokens to a gateway: the gap between two tokens, less the same step
measured alone.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from cluster.events import Completed
from cluster.frontend.text import TextDelta
from cluster.offline.profile.steps import measured
from cluster.offline.workload.prompts import FIRST_TOKEN
from diptych.client import AsyncClient
from diptych.request_ids import PROFILE_PREFIX, new_id
from diptych.shapes import Shape
from workers.profiles.measured import SINGLE_REQUEST_TOKENS
from workers.profiles.profile_errors import ProfileError

PROMPT_TOKENS, ANSWER_TOKENS = SINGLE_REQUEST_TOKENS, 48
SINGLE, CONCURRENT, ROUNDS = 7, 8, 3  # single requests; requests at once, and how often
STEPS = 24
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RequestOverhead:
    """`frontend_s`: of a first token, beyond the ledger. `single_request_s`: median ledger phases until then.

    `gap_s` is added to a step of one decode, and `gap_row_s` for each further decode.
    """

    frontend_s: float
    gap_s: float
    gap_row_s: float
    kv_token_bytes: int
    single_request_s: dict[str, float]


@dataclass(slots=True)
class TimedAnswer:
    """An answer while and after it streams. `token_s`: when each token came."""

    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    completed: Completed | None = None


async def measure_overhead(client: AsyncClient, decoder: str, vocab_size: int) -> RequestOverhead:
    """`decoder`: a worker that decodes; it stands for its pool.

    Raises `DiptychError`, also when requests do not end in time, and `ProfileError` when the cluster is busy.
    """
    source = random.Random(0)
    await _answers(client, source, vocab_size, 1)  # warm up
    single, gaps_s = await _gaps(client, source, vocab_size, decoder, 1, SINGLE)
    _, concurrent_gaps_s = await _gaps(client, source, vocab_size, decoder, CONCURRENT, ROUNDS)
    gap_s = max(0.0, median(gaps_s)) if gaps_s else 0.0
    concurrent_gap_s = median(concurrent_gaps_s) if concurrent_gaps_s else gap_s
    phases: dict[str, list[float]] = {}
    frontend_s, completed = [], []
    for (answer,) in single:
        assert answer.completed is not None, "the stream has ended"
        completed.append(answer.completed)
        frontend_s.append(answer.token_s[0] - answer.sent_s - answer.completed.ledger.ttft_ns / 1e9)
        for phase, ns in answer.completed.ledger.first:
            phases.setdefault(phase, []).append(ns / 1e9)
    return RequestOverhead(
        frontend_s=max(0.0, median(frontend_s)),
        gap_s=gap_s,
        gap_row_s=max(0.0, concurrent_gap_s - gap_s) / (CONCURRENT - 1),
        kv_token_bytes=_token_bytes(completed[0]),
        single_request_s={phase: median(seconds) for phase, seconds in phases.items()},
    )


async def _gaps(
    client: AsyncClient, source: random.Random, vocab_size: int, decoder: str, count: int, rounds: int
) -> tuple[list[list[TimedAnswer]], list[float]]:
    """`rounds` times `count` answers at once, and by how much their tokens are further apart than the same steps.

    The machine's speed drifts, so each round measures both. No gaps when the worker cannot take such a step.
    """
    answers, gaps_s = [], []
    for _ in range(rounds):
        step_s = await _step_s(client, decoder, count)
        if step_s is None and count > 1:
            break
        answers.append(await _answers(client, source, vocab_size, count))
        if step_s is not None:
            gaps_s.append(_gap_s(answers[-1]) - step_s)
    return answers, gaps_s


async def _answers(client: AsyncClient, source: random.Random, vocab_size: int, count: int) -> list[TimedAnswer]:
    """`count` answers at once. The first error ends them all."""
    answers = [TimedAnswer() for _ in range(count)]
    prompts = [random_prompt(source, vocab_size) for _ in answers]
    try:
        async with asyncio.TaskGroup() as group:
            for answer, prompt in zip(answers, prompts, strict=True):
                group.create_task(stream_answer(client, prompt, ANSWER_TOKENS, answer))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return answers


def random_prompt(source: random.Random, vocab_size: int) -> list[int]:
    return source.choices(range(FIRST_TOKEN, vocab_size), k=PROMPT_TOKENS)


async def stream_answer(
    client: AsyncClient,
    prompt: list[int],
    num_tokens: int,
    answer: TimedAnswer,
    on_tokens: Callable[[], None] = lambda: None,
) -> None:
    """Record into `answer` when its tokens come."""
    clock = asyncio.get_running_loop().time
    answer.sent_s = clock()
    stream = client.generate(
        prompt,
        max_tokens=num_tokens,
        temperature=0.0,
        ignore_eos=True,
        timeout_s=TIMEOUT_S,
        request_id=f"{PROFILE_PREFIX}{new_id()}",  # no load to `diptych plan --from-cluster`
    )
    async for event in stream:
        if isinstance(event, TextDelta):
            answer.token_s += [clock()] * len(event.tokens)
            on_tokens()
        elif isinstance(event, Completed):
            answer.completed = event


def _gap_s(answers: Sequence[TimedAnswer]) -> float:
    """While all answers stream."""
    begin_s = max(answer.token_s[1] for answer in answers)
    return mean_gap_s(answers, begin_s, min(answer.token_s[-1] for answer in answers))


def mean_gap_s(answers: Sequence[TimedAnswer], begin_s: float, end_s: float) -> float:
    """The mean time between two tokens of an answer in this span. Means, since several tokens may come at once.

    Raises `ProfileError` when no answer streams in the span.
    """
    within = [[at_s for at_s in answer.token_s if begin_s <= at_s <= end_s] for answer in answers]
    gaps = sum(len(times) - 1 for times in within if times)
    seconds = sum(times[-1] - times[0] for times in within if times)
    if gaps < 1 or not seconds:
        raise ProfileError(f"{len(answers)} answers did not stream at the same time; is the cluster busy?")
    return seconds / gaps


async def _step_s(client: AsyncClient, decoder: str, batch: int) -> float | None:
    """The same step, without sending its tokens; None when the worker cannot take such a step."""
    timings = await measured(client, decoder, Shape((), batch, PROMPT_TOKENS + ANSWER_TOKENS // 2), STEPS)
    return median(timings.seconds) if timings is not None and timings.seconds else None


def _token_bytes(completed: Completed) -> int:
    """KV bytes of a token. Transfers move whole blocks, so a block's tokens are the power of two that fits."""
    for report in completed.transfers:
        if report.num_blocks:
            block_tokens = 1
            while -(-PROMPT_TOKENS // block_tokens) > report.num_blocks:
                block_tokens *= 2
            return report.num_bytes // report.num_blocks // block_tokens
    return 0
