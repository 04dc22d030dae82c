"""The attention port: writing K and V into the block pool, and attending to what lies there.

A backend is a pair of functions over flat ragged metadata, which a compiler sees as opaque torch ops with honest
aliasing, so that it does not copy the pool. Knows the pool's order `[block, kv_head, layer, k|v, slot, head_dim]`;
knows no model. `REFERENCE` is the truth, every other backend is compared with it, once more before it is chosen.
"""

import functools
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.ops import reference, sdpa
from workers.ops.batch import RaggedBatch
from workers.ops.native import attention as native
from workers.ops.native.library import SWITCH, library

logger = logging.getLogger(__name__)

_OPS = torch.library.Library("diptych", "DEF")  # type: ignore[no-untyped-call]
_WRITE = "(Tensor(a!) pool, Tensor key, Tensor value, int layer, Tensor slot_mapping) -> ()"
_ATTEND = (
    "(Tensor query, Tensor pool, int layer, Tensor query_starts, Tensor context_lens, Tensor block_tables, "
    "Tensor slot_mapping, int max_query, int max_context, float scale, int window, float softcap) -> Tensor"
)


class Attend(Protocol):
    def __call__(
        self, query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scale: float, window: int, softcap: float
    ) -> Tensor: ...


class Attention:
    """One backend, registered as the torch ops `diptych::write_kv_<name>` and `diptych::attend_<name>`.

    Outside of a compiler its functions are called directly: a torch op written in Python costs more than a kernel does
    for one token. `batch_invariant`: a row's bits depend on its own query and keys only.
    """

    def __init__(
        self,
        name: str,
        write_kv: Callable[[Tensor, Tensor, Tensor, int, Tensor], None],
        attend: Attend,
        batch_invariant: bool = False,
    ) -> None:
        self.name = name
        self.batch_invariant = batch_invariant
        self._write = write_kv
        self._attend = attend

        def attend_op(
            query: Tensor, pool: Tensor, layer: int, starts: Tensor, contexts: Tensor, tables: Tensor, slots: Tensor,
            max_query: int, max_context: int, scale: float, window: int, softcap: float,
        ) -> Tensor:  # fmt: skip
            batch = RaggedBatch(starts, contexts, tables, slots, max_query, max_context)
            return attend(query, pool, layer, batch, scale, window, softcap)

        _OPS.define(f"write_kv_{name}{_WRITE}")  # type: ignore[no-untyped-call]
        _OPS.define(f"attend_{name}{_ATTEND}")  # type: ignore[no-untyped-call]
        _OPS.impl(f"write_kv_{name}", write_kv, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        _OPS.impl(f"attend_{name}", attend_op, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"diptych::write_kv_{name}", lambda *_: None, lib=_OPS)
        torch.library.register_fake(f"diptych::attend_{name}", _empty_answer, lib=_OPS)
        self._write_op = getattr(torch.ops.diptych, f"write_kv_{name}").default
        self._attend_op = getattr(torch.ops.diptych, f"attend_{name}").default

    def write_kv(self, pool: Tensor, key: Tensor, value: Tensor, layer: int, batch: RaggedBatch) -> None:
        """Store key and value [tokens, kv_heads, head_dim] of `layer` (the pool's own index) at their slots.

        Rounded as `narrowed` does.
        """
        write = self._write_op if torch.compiler.is_compiling() else self._write
        write(pool, key, value, layer, batch.slot_mapping)

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
        if not torch.compiler.is_compiling():
            return self._attend(query, pool, layer, batch, scale, window, softcap)
        answer: Tensor = self._attend_op(
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


def _triton_write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    from workers.ops import triton_paged  # only where there is Triton

    triton_paged.write_kv(pool, key, value, layer, slot_mapping)


def _triton_attend(
    query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scale: float, window: int, softcap: float
) -> Tensor:
    from workers.ops import triton_paged

    return triton_paged.attend(query, pool, layer, batch, scale, window, softcap)


def _empty_answer(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


REFERENCE = Attention("reference", reference.write_kv, reference.attend)
SDPA = Attention("sdpa", sdpa.write_kv, sdpa.attend)
NATIVE = Attention("native", native.write_kv, native.attend, batch_invariant=True)
TRITON = Attention("triton", _triton_write_kv, _triton_attend, batch_invariant=True)


@functools.cache
def best_attention(device: torch.device, dtype: torch.dtype, deterministic: bool) -> Attention:
    """The fastest backend that works here for a pool of `dtype` on `device`; the first call may compile.

    `deterministic` asks for one that is batch invariant. Raises `ModelError` where there is none.
    """
    fastest = [NATIVE] if device.type == "cpu" and library() is not None else [TRITON] if device.type == "cuda" else []
    for attention in [*fastest, SDPA]:
        if deterministic and not attention.batch_invariant:
            continue
        if _agrees(attention, device, dtype):
            logger.info("attention on %s with %s KV: %s", device, dtype, attention.name)
            return attention
    asked = "batch-invariant attention" if deterministic else "attention"
    raise ModelError(f"no {asked} on {device} with {dtype} KV works; on a CPU install g++ and leave {SWITCH} alone")


def _agrees(attention: Attention, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the backend runs here and computes what the reference does, for a decode and a prompt chunk."""
    generator = torch.Generator().manual_seed(0)
    query_dtype = torch.float32 if device.type == "cpu" else dtype
    pool = torch.randn(6, 2, 1, 2, 16, 64, generator=generator).to(device, dtype)
    query = torch.randn(4, 4, 64, generator=generator).to(device, query_dtype)
    key, value = torch.randn(2, 4, 2, 64, generator=generator).to(device, query_dtype)

    def integers(*numbers: object, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=kind, device=device)

    slots = integers(66, 37, 38, 39, kind=torch.int64)
    batch = RaggedBatch(integers(0, 1, 4), integers(19, 24), integers([3, 4], [5, 2]), slots, 3, 24)
    answers = []
    for each in (REFERENCE, attention):
        its_pool = pool.clone()
        try:
            each.write_kv(its_pool, key, value, 0, batch)
            answers.append((its_pool, each.attend(query, its_pool, 0, batch, 0.125, window=20)))
        except Exception as error:
            logger.warning("attention %s does not work on %s with %s KV: %s", each.name, device, dtype, error)
            return False
    (expected_pool, expected), (written_pool, answer) = answers
    tolerance = 1e-4 if query_dtype == torch.float32 else 2e-2
    if torch.equal(expected_pool, written_pool) and torch.allclose(answer, expected, tolerance, tolerance):
        return True
    logger.warning("attention %s computes wrongly on %s with %s KV, and is passed over", attention.name, device, dtype)
    return False
