"""A step plan as tensors. Pure: the same plan gives the same tensors, and nothing is remembered between steps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.step import Chunk, Draw, StepPlan
from workers.ops.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward pass reads. `rows[i]` of the token axis gives the logits for `draws[i]` of chunk `drawn[i]`."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    batch: RaggedBatch
    rows: Tensor  # [draws] int64
    draws: tuple[Draw, ...]
    drawn: tuple[int, ...]


def step_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """The plan's chunks on one flat token axis, in the plan's order."""
    chunks = plan.chunks
    assert chunks and all(chunk.tokens for chunk in chunks), f"step {plan.number} has nothing to compute"
    lengths = [len(chunk.tokens) for chunk in chunks]
    contexts = [chunk.context for chunk in chunks]
    stops = np.cumsum(lengths)
    drawn = tuple(index for index, chunk in enumerate(chunks) if chunk.draw is not None)

    def tensor(array: NDArray[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepInputs(
        tokens=tensor(np.concatenate([np.array(chunk.tokens, np.int64) for chunk in chunks])),
        positions=tensor(np.concatenate([_positions(chunk) for chunk in chunks])),
        batch=RaggedBatch(
            query_starts=tensor(np.array([0, *stops], np.int32)),
            context_lens=tensor(np.array(contexts, np.int32)),
            block_tables=tensor(_block_tables(chunks)),
            slot_mapping=tensor(np.concatenate([_slots(chunk, block_size) for chunk in chunks])),
            max_query=max(lengths),
            max_context=max(contexts),
        ),
        rows=tensor(stops[list(drawn)].astype(np.int64) - 1),
        draws=tuple(chunk.draw for chunk in chunks if chunk.draw is not None),
        drawn=drawn,
    )


def _positions(chunk: Chunk) -> NDArray[np.int64]:
    return np.arange(chunk.first_position, chunk.context, dtype=np.int64)


def _slots(chunk: Chunk, block_size: int) -> NDArray[np.int64]:
    """Where each of the chunk's tokens lies in the pool: block * block_size + slot."""
    positions = _positions(chunk)
    blocks = np.array(chunk.blocks, np.int64)[positions // block_size]
    return blocks * block_size + positions % block_size


def _block_tables(chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
    """[chunks, longest table], each row padded with its own first block (see `RaggedBatch`)."""
    width = max(len(chunk.blocks) for chunk in chunks)
    tables = np.empty((len(chunks), width), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[:] = chunk.blocks[0]
        row[: len(chunk.blocks)] = chunk.blocks
    return tables
