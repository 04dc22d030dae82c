"""Turns a step plan into tensors, which reach the device in one copy. Keeps nothing between steps."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.step import Chunk, Draw, StepPlan
from workers.ops.batch import RaggedBatch
from workers.ops.span import SPAN
from workers.ops.staging import to_device


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one forward pass.

    Row `rows[i]` of the token axis gives the logits for `draws[i]`, which belongs to chunk `sampled_chunks[i]`. Further
    rows predict the targets of all chunks, for prompt log probabilities.
    """

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    batch: RaggedBatch
    rows: Tensor  # [draws + targets] int64
    draws: tuple[Draw, ...]
    sampled_chunks: tuple[int, ...]


def step_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """The plan's chunks on one flat token axis, in the plan's order."""
    chunks = plan.chunks
    assert chunks and all(chunk.tokens for chunk in chunks), f"step {plan.number} has nothing to compute"
    lengths = np.array([len(chunk.tokens) for chunk in chunks])
    firsts = np.array([chunk.first_position for chunk in chunks])
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    contexts = firsts + lengths
    tables = _block_tables(chunks)

    chunk_of = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]
    positions = np.arange(starts[-1]) + (firsts - starts[:-1])[chunk_of]  # [tokens]
    blocks = tables[chunk_of, positions // block_size].astype(np.int64)  # [tokens]
    tokens = np.fromiter(chain.from_iterable(chunk.tokens for chunk in chunks), np.int64, int(starts[-1]))
    slots = blocks * block_size + positions % block_size
    begins = [_begins(chunks, block_size)] if any(chunk.remote for chunk in chunks) else []
    arrays = [tokens, positions, slots, _rows(chunks, starts), starts, contexts.astype(np.int32), tables, *begins]
    tokens_, positions_, slots_, rows_, starts_, contexts_, tables_, *begins_ = to_device(arrays, device)
    return StepInputs(
        tokens=tokens_,
        positions=positions_,
        batch=RaggedBatch(
            query_starts=starts_,
            context_lens=contexts_,
            block_tables=tables_,
            slot_mapping=slots_,
            max_query=int(lengths.max()),
            max_context=int(contexts.max()),
            begins=begins_[0] if begins_ else None,
        ),
        rows=rows_,
        draws=tuple(chunk.draw for chunk in chunks if chunk.draw is not None),
        sampled_chunks=tuple(index for index, chunk in enumerate(chunks) if chunk.draw is not None),
    )


def _rows(chunks: tuple[Chunk, ...], starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """The last row of each chunk with a draw, then the rows that predict targets."""
    drawn = [int(stop) - 1 for stop, chunk in zip(starts[1:], chunks, strict=True) if chunk.draw is not None]
    predicting = [
        start + np.arange(len(chunk.targets)) for start, chunk in zip(starts, chunks, strict=False) if chunk.targets
    ]
    return np.concatenate([np.array(drawn, np.int64), *predicting])


def _begins(chunks: tuple[Chunk, ...], block_size: int) -> NDArray[np.int32]:
    """[chunks]: the first position of each whose KV is in the pool."""
    begins = np.array([chunk.num_remote * block_size for chunk in chunks], np.int32)
    assert not (begins % SPAN).any(), f"remote KV of {begins.tolist()} tokens; only whole spans of {SPAN} can be remote"
    return begins


def _block_tables(chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
    """[chunks, longest table], each row padded with its own first block (see `RaggedBatch`)."""
    lengths = np.array([len(chunk.blocks) for chunk in chunks])
    blocks = np.fromiter(chain.from_iterable(chunk.blocks for chunk in chunks), np.int32, int(lengths.sum()))
    tables = np.repeat(np.array([[chunk.blocks[0]] for chunk in chunks], np.int32), lengths.max(), axis=1)
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = blocks
    return tables
