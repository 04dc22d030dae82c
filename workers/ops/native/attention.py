"""The native kernels of `attention.cpp` as an attention backend.

Knows how tensors become pointers and strides. Needs `library()`. The bits of a row depend only on its own query and
keys.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from workers.ops.batch import SPAN, KeySpan, RaggedBatch, Scoring
from workers.ops.native.library import kernel, pointer

_WAIT = ctypes.CFUNCTYPE(ctypes.c_void_p)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


def write_kv(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """See `workers.ops.attention.Attention`."""
    key, value = _dense_heads(key), _dense_heads(value)
    kernel("write_kv")(
        pointer(key), key.stride(0), pointer(value), value.stride(0), *_paged(pool, layer), key.shape[2],
        pointer(slot_mapping), slot_mapping.shape[0],
    )  # fmt: skip


def attend(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
    """See `workers.ops.attention.Attend`."""
    rows = query if query.dtype == torch.float32 else query.float()
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    token_stride, head_stride, _ = rows.stride()
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    tables = batch.block_tables
    sequences, table_stride = tables.shape  # dense
    sinks = None if scoring.sinks is None else scoring.sinks.float()
    waiting = None if batch.states is None else _Waiting(batch.states)
    kernel("attend")(
        pointer(rows), token_stride, head_stride, pointer(output), rows.shape[1], *_paged(pool, layer), rows.shape[2],
        pointer(batch.query_starts), pointer(batch.context_lens), pointer(tables), table_stride, sequences,
        scoring.scale, scoring.window, scoring.softcap, _optional(sinks), _optional(batch.begins),
        None if waiting is None else waiting.pointer,
    )  # fmt: skip
    if waiting is not None and waiting.error is not None:
        raise waiting.error
    return output if output.dtype == query.dtype else output.to(query.dtype)


class _Waiting:
    """Calls `states` from the kernel and keeps the result alive. An error waits for the kernel's end."""

    def __init__(self, states: Callable[[], Tensor]) -> None:
        self.error: BaseException | None = None
        self._states = states
        self.pointer = _WAIT(self._wait)

    def _wait(self) -> int | None:
        try:
            self._got = self._states()
            return pointer(self._got)
        except BaseException as error:
            self.error = error
            return None


def attend_span(query: Tensor, pool: Tensor, layer: int, span: KeySpan, scoring: Scoring) -> Tensor:
    """See `workers.ops.attention.AttendSpan`."""
    tokens, heads, head_dim = query.shape
    assert span.num_keys % SPAN == 0 and span.num_keys <= span.position
    output = torch.empty(tokens, heads, head_dim + 2)
    kernel("attend_span")(
        pointer(query), query.stride(0), query.stride(1), pointer(output), heads, *_paged(pool, layer), head_dim,
        tokens, span.position, span.begin, pointer(span.table), span.num_keys,
        scoring.scale, scoring.window, scoring.softcap, _optional(span.state),
    )  # fmt: skip
    return output


def _paged(pool: Tensor, layer: int) -> tuple[int, ...]:
    """The kernels' arguments for one layer of a pool."""
    assert pool.is_contiguous() and not pool.is_cuda
    _, kv_heads, layers, vectors, block_size, _ = pool.shape
    return pointer(pool), _KINDS[pool.dtype], layer, layers, kv_heads, vectors, block_size


def _optional(tensor: Tensor | None) -> int | None:
    return None if tensor is None else pointer(tensor)


def _dense_heads(tensor: Tensor) -> Tensor:
    """[tokens, kv_heads, head_dim] in float32, with each token's numbers contiguous."""
    tensor = tensor if tensor.dtype == torch.float32 else tensor.float()
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()
