"""The attention port: writing K and V into the block pool, and attending to what lies there.

A backend is a pair of torch custom ops over flat ragged metadata, so that a compiler or a graph capture sees opaque
ops with honest aliasing instead of copying the pool. Knows the pool's order `[block, kv_head, layer, k|v, slot,
head_dim]`; knows no model. `REFERENCE` is the truth, every other backend is compared with it.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from workers.ops import reference, sdpa
from workers.ops.batch import RaggedBatch


class Attend(Protocol):
    def __call__(
        self, query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scale: float, window: int, softcap: float
    ) -> Tensor: ...


class Attention:
    """One backend, as the custom ops `diptych::write_kv_<name>` and `diptych::attend_<name>`."""

    def __init__(
        self, name: str, write_kv: Callable[[Tensor, Tensor, Tensor, int, Tensor], None], attend: Attend
    ) -> None:
        self.name = name

        @torch.library.custom_op(f"diptych::write_kv_{name}", mutates_args=("pool",))
        def write_op(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
            write_kv(pool, key, value, layer, slot_mapping)

        @torch.library.custom_op(f"diptych::attend_{name}", mutates_args=())
        def attend_op(
            query: Tensor,
            pool: Tensor,
            layer: int,
            query_starts: Tensor,
            context_lens: Tensor,
            block_tables: Tensor,
            slot_mapping: Tensor,
            max_query: int,
            max_context: int,
            scale: float,
            window: int,
            softcap: float,
        ) -> Tensor:
            batch = RaggedBatch(query_starts, context_lens, block_tables, slot_mapping, max_query, max_context)
            return attend(query, pool, layer, batch, scale, window, softcap)

        @attend_op.register_fake
        def _(query: Tensor, *_: object) -> Tensor:
            return torch.empty_like(query, memory_format=torch.contiguous_format)

        self._write = write_op
        self._attend = attend_op

    def write_kv(self, pool: Tensor, key: Tensor, value: Tensor, layer: int, batch: RaggedBatch) -> None:
        """Store key and value [tokens, kv_heads, head_dim] of `layer` (the pool's own index) at their slots."""
        self._write(pool, key, value, layer, batch.slot_mapping)

    def attend(
        self,
        query: Tensor,
        pool: Tensor,
        layer: int,
        batch: RaggedBatch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the pool's `layer`; answers the query's shape.

        Head h of the query reads KV head h // (heads / kv_heads). A query sees itself and the window - 1 tokens before
        it (0: all). Scores s become softcap * tanh(s / softcap) unless softcap is 0.
        """
        answer: Tensor = self._attend(
            query,
            pool,
            layer,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.slot_mapping,
            batch.max_query,
            batch.max_context,
            scale,
            window,
            softcap,
        )
        return answer


REFERENCE = Attention("reference", reference.write_kv, reference.attend)
SDPA = Attention("sdpa", sdpa.write_kv, sdpa.attend)
