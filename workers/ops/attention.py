"""The attention port: writing K and V into the block pool, and attending to what lies there.

A backend is a pair of torch custom ops over flat ragged metadata, so that a compiler or a graph capture sees opaque
ops with honest aliasing instead of copying the pool. Knows the pool's order `[block, kv_head, layer, k|v, slot,
head_dim]`; knows no model. `reference` is the truth, every other backend is compared with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.ops import reference, sdpa


class WriteKV(Protocol):
    def __call__(self, pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
        """Store key and value [tokens, kv_heads, head_dim] of `layer` (the pool's own index) at their slots."""
        ...


class Attend(Protocol):
    def __call__(
        self,
        query: Tensor,
        pool: Tensor,
        layer: int,
        block_tables: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        scale: float,
    ) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the pool's `layer`; answers the query's shape."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """One backend. Head h of the query reads KV head h // (heads / kv_heads)."""

    name: str
    write_kv: WriteKV
    attend: Attend


@torch.library.custom_op("diptych::write_kv", mutates_args=("pool",))
def _write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    sdpa.write_kv(pool, key, value, layer, slot_mapping)


@torch.library.custom_op("diptych::write_kv_reference", mutates_args=("pool",))
def _write_kv_reference(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    reference.write_kv(pool, key, value, layer, slot_mapping)


@torch.library.custom_op("diptych::attend", mutates_args=())
def _attend(
    query: Tensor,
    pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> Tensor:
    return sdpa.attend(query, pool, layer, block_tables, query_lens, context_lens, scale)


@torch.library.custom_op("diptych::attend_reference", mutates_args=())
def _attend_reference(
    query: Tensor,
    pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> Tensor:
    return reference.attend(query, pool, layer, block_tables, query_lens, context_lens, scale)


@_attend.register_fake
@_attend_reference.register_fake
def _attend_shape(
    query: Tensor,
    pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


REFERENCE = Attention("reference", _write_kv_reference, _attend_reference)
SDPA = Attention("sdpa", _write_kv, _attend)
