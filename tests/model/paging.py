"""Running a model over scattered blocks, for tests that care about numbers and not about scheduling."""

import itertools
import random

import torch
from torch import Tensor

from workers.executor.kv_pool import KVPool, allocate_pool
from workers.model.config import ModelConfig
from workers.model.decoder import Decoder
from workers.model.kv_layers import kv_layout
from workers.ops.batch import RaggedBatch


def pool_for(config: ModelConfig, num_blocks: int, block_size: int = 4, dtype: str = "float32") -> KVPool:
    layout = kv_layout(config, "test", block_size, dtype)
    return allocate_pool(layout, num_blocks, torch.device("cpu"))


def scattered_tables(lengths: list[int], num_blocks: int, block_size: int, rng: random.Random) -> list[list[int]]:
    """A block table for each length, from one shuffled pool; no block serves two sequences."""
    free = rng.sample(range(num_blocks), num_blocks)
    return [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]


def ragged(tables: list[list[int]], query_lens: list[int], context_lens: list[int], block_size: int) -> RaggedBatch:
    width = max(len(table) for table in tables)
    padded = [table + [table[0]] * (width - len(table)) for table in tables]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, length, context in zip(tables, query_lens, context_lens, strict=True)
        for position in range(context - length, context)
    ]
    starts = [0, *itertools.accumulate(query_lens)]
    return RaggedBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
        torch.tensor(padded, dtype=torch.int32),
        torch.tensor(slots),
        max(query_lens),
        max(context_lens),
        num_decodes=next((row for row, length in enumerate(query_lens) if length > 1), len(query_lens)),
    )


@torch.inference_mode()
def next_tokens(prompts: list[list[int]], done: list[int], step: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The tokens of a step of (prompt, number of its next tokens), and their positions; counts them as done."""
    tokens: list[int] = []
    positions: list[int] = []
    for prompt, length in step:
        tokens += prompts[prompt][done[prompt] : done[prompt] + length]
        positions += range(done[prompt], done[prompt] + length)
        done[prompt] += length
    return tokens, positions


def forward(
    model: Decoder, tokens: Tensor, positions: Tensor, rows: Tensor, batch: RaggedBatch, pool: Tensor
) -> Tensor:
    """Logits [rows, vocab] of a whole model for the given rows of the token axis; writes KV into the pool."""
    logits = model.logits(model.run(model.embed(tokens), positions, rows, batch, pool))
    assert logits is not None
    return logits


def run_chunks(
    model: Decoder, pool: KVPool, prompts: list[list[int]], tables: list[list[int]], steps: list[list[tuple[int, int]]]
) -> list[Tensor]:
    """Logits of every token of every prompt. Each step is a list of (prompt, number of its next tokens)."""
    done = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        tokens, positions = next_tokens(prompts, done, step)
        batch = ragged(
            [tables[prompt] for prompt, _ in step],
            [length for _, length in step],
            [done[prompt] for prompt, _ in step],
            pool.region.layout.block_size,
        )
        rows = torch.arange(len(tokens))
        answer = forward(model, torch.tensor(tokens), torch.tensor(positions), rows, batch, pool.blocks)
        for (prompt, _), part in zip(step, answer.split([length for _, length in step]), strict=True):
            logits[prompt].append(part)
    return [torch.cat(parts) for parts in logits]
