"""A ragged batch: sequences of different lengths on one flat token axis, with their paged KV.

Knows lengths, block tables and slots. Knows no model and no device beyond where its tensors lie.

    tokens    | a a a a a | b | c c |        flat axis, one run of query tokens per sequence
    query_lens  5           1   2
    context_lens 5          40  18           keys that a run's last token sees, itself included
    block_tables [3 7 0]  [4 9 ..] ...       one row per sequence, padded with the row's own first block
    slot_mapping 48 49 ...                   where each token's K and V go: block * block_size + slot
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """`block_tables` [sequences, blocks] and `slot_mapping` [tokens] are int64 on the pool's device.

    Padding a table with the row's own first block keeps every gathered number one that this sequence wrote.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    slot_mapping: Tensor

    def __post_init__(self) -> None:
        assert len(self.query_lens) == len(self.context_lens) == self.block_tables.shape[0]
        assert sum(self.query_lens) == self.slot_mapping.shape[0]
