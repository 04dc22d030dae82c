"""Step plans for a model without an engine: decodes, chunks of prompts, mixed batches, and greedy generation."""

import random
from collections.abc import Iterator, Sequence

import numpy as np

from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor.kv_pool import KVPool
from workers.executor.rank import ModelPart, compute
from workers.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, logprobs=1),
    SamplingParams(temperature=0.9, seed=1, top_p=0.8),
    SamplingParams(temperature=1.1, seed=1, top_k=9, frequency_penalty=0.5),
)


def decodes(number: int, tokens: Sequence[int], context: int, tables: Sequence[tuple[int, ...]], size: int) -> StepPlan:
    """One token of each sequence, which then has `context` tokens in blocks of `size`."""
    used = -(-context // size)
    draw = Draw(GREEDY, seed=0, position=context)
    chunks = [
        Chunk(str(row), (token,), context - 1, table[:used], draw)
        for row, (token, table) in enumerate(zip(tokens, tables, strict=True))
    ]
    return StepPlan(number, tuple(chunks))


def prompt(tokens: Sequence[int], first: int, table: tuple[int, ...], size: int, *, last: bool = True) -> StepPlan:
    """A chunk of one prompt, from position `first` on; `last`: it samples the next token."""
    end = first + len(tokens)
    draw = Draw(GREEDY, seed=0, position=end) if last else None
    return StepPlan(1, (Chunk("prompt", tuple(tokens), first, table[: -(-end // size)], draw),))


def mixed(count: int, blocks: Sequence[int], size: int) -> Iterator[StepPlan]:
    """Up to four decodes and chunks of prompts, of any length and at any place, with any sampling."""
    rng = random.Random(5)
    for number in range(count):
        chunks = []
        for at in range(rng.choice([1, 2, 4])):
            tokens = 1 if at < rng.choice([0, 1, 3, 4]) else rng.choice([1, 5, 16, 32])
            first, sampling = rng.choice([0, 1, 15, 16, 60, 200]), rng.choice(SAMPLINGS)
            seen, counts = (np.array([each], np.int32).tobytes() for each in (7, 2))
            penalty = (seen, counts) if sampling.frequency_penalty else ()
            draw = Draw(sampling, 1, first + tokens, *penalty) if tokens == 1 or rng.random() < 0.7 else None
            table = tuple(rng.sample(blocks, -(-(first + tokens) // size)))
            chunks.append(Chunk(f"{at}/0", tuple(range(3, 3 + tokens)), first, table, draw))
        yield StepPlan(number, tuple(sorted(chunks, key=lambda chunk: len(chunk.tokens) > 1)))


def greedy(
    part: ModelPart, pool: KVPool, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int, first_block: int = 1
) -> list[list[int]]:
    """The answers: prompts in chunks, one after another, then all decodes in one batch."""
    size = pool.region.layout.block_size
    tables, next_block = [], first_block
    for tokens in prompts:
        blocks = -(-(len(tokens) + num_tokens) // size)
        tables.append(tuple(range(next_block + blocks - 1, next_block - 1, -1)))
        next_block += blocks
    answers: list[list[int]] = []
    for tokens, table in zip(prompts, tables, strict=True):
        for first in range(0, len(tokens), chunk):
            piece = tokens[first : first + chunk]
            step = compute(part, pool, prompt(piece, first, table, size, last=first + chunk >= len(tokens)))
        answers.append([_real(step.tokens[0])])
    for _ in range(num_tokens - 1):
        chunks = []
        for row, (tokens, answer, table) in enumerate(zip(prompts, answers, tables, strict=True)):
            context = len(tokens) + len(answer)
            draw = Draw(GREEDY, seed=0, position=context)
            chunks.append(Chunk(str(row), (answer[-1],), context - 1, table[: -(-context // size)], draw))
        for answer, token in zip(answers, compute(part, pool, StepPlan(1, tuple(chunks))).tokens, strict=True):
            answer.append(_real(token))
    return answers


def _real(token: int | None) -> int:
    assert token is not None, "logits were not finite"
    return token
