"""The attention port: write K and V into the block pool, and attend to what is there.

A backend is a pair of functions over flat ragged metadata. Knows the pool's layout `[block, kv_head, layer, k|v, slot,
slot_size]`; knows no model. In a pool with one vector instead of k|v, a latent, it is both. `REFERENCE` defines the
result; `best_attention` checks a backend against it before use.
"""

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.ops import reference, sdpa
from workers.ops.batch import KeySpan, RaggedBatch, Scoring
from workers.ops.narrow import compute_dtype, to_slots
from workers.ops.native import attention as native
from workers.ops.native.library import SWITCH, library

logger = logging.getLogger(__name__)


class Attend(Protocol):
    def __call__(
        self,
        query: Tensor,
        pool: Tensor,
        layer: int,
        batch: RaggedBatch,
        scoring: Scoring,
    ) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the pool's `layer`; returns the query's shape.

        Head h of the query reads KV head h // (heads / kv_heads). Sequences with `batch.begins` continue from
        `batch.states`.
        """


class AttendSpan(Protocol):
    def __call__(self, query: Tensor, pool: Tensor, layer: int, span: KeySpan, scoring: Scoring) -> Tensor:
        """The state [tokens, heads, head_dim + 2] after a span (see `workers.ops.batch`).

        The query [tokens, heads, head_dim] is float32 and dense. Ignores sinks. The rest is as in `Attend`.
        """


@dataclass(frozen=True)
class Attention:
    """One backend. `batch_invariant`: the bits of a row depend only on its own query and keys. `waits`: for the device,
    whose numbers it needs; no CUDA graph can hold it.

    `write_kv(pool, key, value, layer, slot_mapping)` stores key and value [tokens, kv_heads, head_dim] of `layer` (the
    pool's own index) at their slots, as `to_slots` makes them.
    """

    name: str
    write_kv: Callable[[Tensor, Tensor, Tensor, int, Tensor], None]
    attend: Attend
    batch_invariant: bool = False
    waits: bool = False
    attend_span: AttendSpan = sdpa.attend_span


def _continued(attend: Attend) -> Attend:
    """A backend's `attend` that knows no states, for batches with states too."""

    def attend_all(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
        if batch.begins is None or batch.states is None:
            return attend(query, pool, layer, batch, scoring)
        # The rows that continue from a state are computed twice: first wrongly, from any block.
        readable = replace(batch, block_tables=batch.block_tables.clamp(min=0), begins=None, states=None)
        output = attend(query, pool, layer, readable, scoring)
        runs = itertools.pairwise(batch.query_starts.tolist())
        begins, contexts = batch.begins.tolist(), batch.context_lens.tolist()
        own: list[tuple[slice, Tensor]] = []
        for (start, stop), begin, context, table in zip(runs, begins, contexts, batch.block_tables, strict=True):
            if begin:
                run, num_keys = slice(start, stop), context - begin
                span = KeySpan(table[begin // pool.shape[4] :], num_keys, num_keys - (stop - start), begin=begin)
                own.append((run, sdpa.attend_span(query[run], pool, layer, span, scoring)))
        earlier = batch.states()
        for run, later in own:
            state = sdpa.join(earlier[run], later)
            if scoring.sinks is not None:
                state = sdpa.join(state, sdpa.of_sinks(scoring.sinks, later))
            output[run] = (state[..., 2:] / state[..., 1:2]).to(output.dtype)
        return output

    return attend_all


def _triton_write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    from workers.ops import triton_paged  # only where Triton is installed

    triton_paged.write_kv(pool, key, value, layer, slot_mapping)


def _triton_attend(*, invariant: bool) -> Attend:
    def attend(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
        from workers.ops import triton_paged

        return triton_paged.attend(query, pool, layer, batch, scoring, invariant=invariant)

    return attend


REFERENCE = Attention("reference", reference.write_kv, _continued(reference.attend), waits=True)
SDPA = Attention("sdpa", sdpa.write_kv, _continued(sdpa.attend), waits=True)
NATIVE = Attention("native", native.write_kv, native.attend, batch_invariant=True, attend_span=native.attend_span)
TRITON = Attention("triton", _triton_write_kv, _continued(_triton_attend(invariant=False)))
TRITON_INVARIANT = Attention(
    "triton-invariant", _triton_write_kv, _continued(_triton_attend(invariant=True)), batch_invariant=True
)


@functools.cache
def best_attention(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    vectors: int = 2,
    heads: tuple[int, int] = (2, 64),
) -> Attention:
    """The fastest backend that works here for a pool of `dtype` on `device`; the first call may compile.

    `deterministic` requires a batch-invariant one. `vectors` of a token: K and V, or one, which Triton's kernels do not
    know. `heads`: how many share a KV head, and head_dim; some GPUs have too little shared memory for wide ones. Raises
    `ModelError` if there is none.
    """
    fastest = [TRITON, TRITON_INVARIANT] if device.type == "cuda" else [NATIVE] if library() is not None else []
    fastest = fastest if vectors == 2 or device.type != "cuda" else []
    for attention in [*fastest, SDPA]:
        if deterministic and not attention.batch_invariant:
            continue
        if _agrees(attention, device, dtype, vectors, *heads):
            logger.info("attention on %s with %s KV: %s", device, dtype, attention.name)
            return attention
    required = ("batch-invariant " if deterministic else "") + ("attention" if vectors == 2 else "latent attention")
    raise ModelError(f"no {required} on {device} with {dtype} KV works; on a CPU install g++ and do not set {SWITCH}")


def _agrees(
    attention: Attention, device: torch.device, dtype: torch.dtype, vectors: int, group: int, head_dim: int
) -> bool:
    """Whether the backend runs here and computes what the reference does, for a decode and a prompt chunk."""
    generator = torch.Generator().manual_seed(0)
    query_dtype = compute_dtype(device, dtype)
    pool = to_slots(torch.randn(6, 2, 1, vectors, 16, head_dim, generator=generator), dtype).to(device)
    query = torch.randn(4, 2 * group, head_dim, generator=generator).to(device, query_dtype)
    key, value = torch.randn(2, 4, 2, head_dim, generator=generator).to(device, query_dtype)

    def integers(*numbers: object, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=kind, device=device)

    slots = integers(66, 37, 38, 39, kind=torch.int64)
    batch = RaggedBatch(integers(0, 1, 4), integers(19, 24), integers([3, 4], [5, 2]), slots, 3, 24)
    scoring, results = Scoring(head_dim**-0.5, 20), []
    for backend in (REFERENCE, attention):
        its_pool = pool.clone()
        try:
            backend.write_kv(its_pool, key, value, 0, slots)
            results.append((its_pool.view(torch.uint8), backend.attend(query, its_pool, 0, batch, scoring)))
        except Exception as error:
            logger.warning("attention %s does not work on %s with %s KV: %s", backend.name, device, dtype, error)
            return False
    (expected_pool, expected), (written_pool, result) = results
    tolerance = 1e-4 if query_dtype == torch.float32 else 2e-2
    if torch.equal(expected_pool, written_pool) and torch.allclose(result, expected, tolerance, tolerance):
        return True
    logger.warning("attention %s gives wrong results on %s with %s KV and is not used", attention.name, device, dtype)
    return False
