"""Which keys a query sees, and the unit in which a sequence's leading KV may lie in another worker's pool.

A window is a number of keys, the query's own included; 0: all keys up to it; -n: those of its own chunk of n positions.

The state after a span is [tokens, heads, head_dim + 2] in float32: the largest score of each query and head, the sum of
its weights exp(score - largest), and the sum of the weighted values, as in flash attention. Before any key it is
(-inf, 0, 0).
"""

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from workers.config import SPAN as SPAN

Position = TypeVar("Position", int, Tensor)


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
