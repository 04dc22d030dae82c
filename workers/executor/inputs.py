"""Turns a step plan into arrays, which reach the device in one copy. Pure: keeps nothing between steps."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.config import SPAN
from workers.engine.step import PENDING, Chunk, StepPlan
from workers.ops.batch import RaggedBatch

Ints: TypeAlias = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one forward pass. Row `rows[i]` of the token axis gives the logits for the i-th draw of the plan;
    further rows predict the targets of all chunks, for prompt log probabilities.
    """

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    batch: RaggedBatch
    rows: Tensor  # [draws + targets] int64


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The same on the host. `begins`: see `RaggedBatch`."""

    tokens: Ints
    positions: Ints
    slots: Ints
    rows: Ints
    starts: Ints
    contexts: Ints
    tables: Ints
    begins: Ints | None
    max_query: int
    max_context: int
    num_decodes: int
    adapters: tuple[str, ...] = ()  # those of the plan
    numbers: NDArray[np.int32] | None = None  # [tokens], with adapters: the place of each token's in `adapters`, or -1

    @property
    def all(self) -> list[Ints]:
        """What goes to the device, in the order that `tensors` takes."""
        each = [self.tokens, self.positions, self.slots, self.rows, self.starts, self.contexts, self.tables]
        return each if self.begins is None else [*each, self.begins]

    def fill(self, sampled: Callable[[int], int]) -> None:
        """Replace `PENDING` tokens, which only decodes have: by what was sampled for the chunk of this index."""
        for place in np.flatnonzero(self.tokens == PENDING).tolist():
            self.tokens[place] = sampled(place)

    def tensors(self, on_device: Sequence[Tensor]) -> StepInputs:
        """`on_device`: of `all`."""
        tokens, positions, slots, rows, starts, contexts, tables, *begins = on_device
        longest = self.max_query, self.max_context, self.num_decodes
        batch = RaggedBatch(starts, contexts, tables, slots, *longest, begins[0] if begins else None)
        return StepInputs(tokens, positions, batch, rows)


def step_arrays(plan: StepPlan, block_size: int) -> StepArrays:
    """The plan's chunks on one flat token axis, in the plan's order."""
    chunks = plan.chunks
    lengths = np.array([len(chunk.tokens) for chunk in chunks])
    assert lengths.size and lengths.all(), f"step {plan.number} has nothing to compute"
    firsts = np.array([chunk.first_position for chunk in chunks])
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    contexts = firsts + lengths
    tables = _block_tables(chunks)

    chunk_of = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]
    positions = np.arange(starts[-1]) + (firsts - starts[:-1])[chunk_of]  # [tokens]
    blocks = tables[chunk_of, positions // block_size].astype(np.int64)  # [tokens]
    adapters = tuple(dict.fromkeys([chunk.adapter for chunk in chunks if chunk.adapter]))
    number_of = dict(zip(adapters, range(len(adapters)), strict=True))
    return StepArrays(
        tokens=np.fromiter(chain.from_iterable([chunk.tokens for chunk in chunks]), np.int64, int(starts[-1])),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        rows=_rows(chunks, starts),
        starts=starts,
        contexts=contexts.astype(np.int32),
        tables=tables,
        begins=_begins(chunks, block_size) if any([chunk.remote for chunk in chunks]) else None,
        max_query=int(lengths.max()),
        max_context=int(contexts.max()),
        num_decodes=int((lengths == 1).cumprod().sum()),
        adapters=adapters,
        numbers=np.array([number_of.get(chunk.adapter, -1) for chunk in chunks], np.int32)[chunk_of]
        if adapters
        else None,
    )


def _rows(chunks: tuple[Chunk, ...], starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """The last row of each chunk with a draw, then the rows that predict targets."""
    drawn = starts[1:][[chunk.draw is not None for chunk in chunks]] - 1
    predicting = [starts[index] + np.arange(len(chunk.targets)) for index, chunk in enumerate(chunks) if chunk.targets]
    return np.concatenate([drawn.astype(np.int64), *predicting])


def _begins(chunks: tuple[Chunk, ...], block_size: int) -> NDArray[np.int32]:
    """[chunks]: the first position of each whose KV is in the pool."""
    begins = np.array([chunk.num_remote * block_size for chunk in chunks], np.int32)
    assert not (begins % SPAN).any(), f"remote KV of {begins.tolist()} tokens; only whole spans of {SPAN} can be remote"
    return begins


def _block_tables(chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
    """[chunks, longest table], each row padded with its own first block (see `RaggedBatch`)."""
    lengths = np.array([len(chunk.blocks) for chunk in chunks])
    packed = struct.pack(f"{lengths.sum()}i", *chain.from_iterable([chunk.blocks for chunk in chunks]))  # fast
    blocks = np.frombuffer(packed, np.int32)
    tables = np.empty((len(chunks), lengths.max()), np.int32)
    tables[:] = blocks[lengths.cumsum() - lengths][:, None]
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = blocks
    return tables
