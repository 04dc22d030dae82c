"""What attention gets: a ragged batch, spans of keys, and what the model sets for a layer.

A batch has sequences of different lengths on one flat token axis, with their paged KV. Knows no model.

    tokens    | a a a a a | b | c c |        flat axis, one run of query tokens per sequence
    query_starts  0         5   6    8       where each run begins; the last entry is the length of the axis
    context_lens  5         40  18           keys that a run's last token attends to, itself included
    block_tables [3 7 0]  [4 9 ..] ...       one row per sequence, padded with the row's own first block
    slot_mapping 48 49 ...                   where each token's K and V are stored: block * block_size + slot
    begins        0   256   0                keys before it are not in the pool; their state is in `states`

A window is a number of keys that a query sees, its own included; 0: all keys up to it; -n: those of its own chunk of n
positions. A span is the unit in which a sequence's leading KV may lie in another worker's pool. The state after a span
is [tokens, heads, head_dim + 2] in float32: the largest score of each query and head, the sum of its weights
exp(score - largest), and the sum of the weighted values, as in flash attention. Before any key it is (-inf, 0, 0).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from workers.config import SPAN as SPAN

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All tensors are on the pool's device. Runs of one token come first.

    A table is padded with the row's own first block, so that a kernel only gathers numbers of the same sequence.
    `max_query` and `max_context` are the longest run and context, and at least the first `num_decodes` runs have one
    token: known without a device synchronization. Entries of `block_tables` before `begins` are never read, nor are
    `states` of sequences that begin at 0. To get the states may mean to wait: it is called once, after all
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


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys in a pool for queries whose own KV is elsewhere.

    `table` [blocks] int32 has the blocks of `num_keys` keys, a multiple of SPAN. `position` of the first query counts
    from the first key, and is not below `num_keys`; the sequence has `begin` keys before the first. `state`: dense,
    after the keys before these; None: there are none.
    """

    table: Tensor
    num_keys: int
    position: int
    state: Tensor | None = None
    begin: int = 0


def first_key(position: Position, window: int) -> Position:
    """The first key that a query at `position` sees; below 0 if its window is longer than what is before it."""
    if window > 0:
        return position - window + 1
    return position // -window * -window if window else position * 0


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer does with its queries and keys before attention: a norm with weights, a rotation (`rotate`'s cosines
    and sines), a norm without weights. None: it has none."""

    rotation: tuple[Tensor, Tensor] | None = None
    norm: Tensor | None = None  # [heads + kv_heads, head_dim]
    norm_after: bool = False
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Scoring:
    """The score of a query and a key is `scale` times their product, capped unless `softcap` is 0.

    `window`: the keys that a query sees (see above). `sinks` [heads]: the score of one more key, without a value, that
    all queries of a head see (Xiao et al., Streaming LLMs, 2023).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """softcap * tanh(scores / softcap)."""
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
