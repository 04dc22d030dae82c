"""The unit in which a sequence's leading KV may lie in another worker's pool.

The state after a span is [tokens, heads, head_dim + 2] in float32: the largest score of each query and head, the sum of
its weights exp(score - largest), and the sum of the weighted values, as in flash attention. Before any key it is
(-inf, 0, 0).
"""

from dataclasses import dataclass

from torch import Tensor

from workers.config import SPAN as SPAN


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys in a pool for queries whose own KV is elsewhere.

    `table` [blocks] int32 has the blocks of `num_keys` keys, a multiple of SPAN. `position` of the first query counts
    from the first key, and is not below `num_keys`. `state`: dense, after the keys before these; None: there are none.
    """

    table: Tensor
    num_keys: int
    position: int
    state: Tensor | None = None
