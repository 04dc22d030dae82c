"""Step plans for a model without an engine: decodes at a context, prompt chunks, and greedy generation."""

from collections.abc import Sequence

from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor.kv_pool import KVPool
from workers.executor.rank import ModelPart, compute
from workers.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


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
