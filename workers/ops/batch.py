"""A ragged batch: sequences of different lengths on one flat token axis, with their paged KV.

Knows lengths, block tables and slots; knows no model.

    tokens    | a a a a a | b | c c |        flat axis, one run of query tokens per sequence
    query_starts  0         5   6    8       where each run begins; the last entry is the length of the axis
    context_lens  5         40  18           keys that a run's last token attends to, itself included
    block_tables [3 7 0]  [4 9 ..] ...       one row per sequence, padded with the row's own first block
    slot_mapping 48 49 ...                   where each token's K and V are stored: block * block_size + slot
    begins        0   256   0                keys before it are not in the pool; their state is in `states`
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All tensors are on the pool's device. Runs of one token come first.

    A table is padded with the row's own first block, so that a kernel only gathers numbers of the same sequence.
    `max_query` and `max_context` are the longest run and context, and at least the first `num_decodes` runs have one
    token: known without a device synchronization. Entries of `block_tables` before `begins` are never read, nor are
    `states` (see `span`) of sequences that begin at 0. To get the states may mean to wait: it is called once, after all
    that needs no states is computed.
    """

    query_starts: Tensor  # [sequences + 1] int32
    context_lens: Tensor  # [sequences] int32
    block_tables: Tensor  # [sequences, blocks] int32
    slot_mapping: Tensor  # [tokens] int64
    max_query: int
    max_context: int
    num_decodes: int = 0
    begins: Tensor | None = None  # [sequences] int32, multiples of SPAN; None: the pool has all keys
    states: Callable[[], Tensor] | None = None  # [tokens, heads, head_dim + 2] float32, of one layer

    def __post_init__(self) -> None:
        assert self.query_starts.dtype == self.context_lens.dtype == self.block_tables.dtype == torch.int32
        assert len(self.query_starts) - 1 == len(self.context_lens) == self.block_tables.shape[0]
