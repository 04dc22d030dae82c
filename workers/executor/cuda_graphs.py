"""CUDA graphs of decode steps: one launch replaces those of all layers, whose host time exceeds the device's.

A graph computes a bucket: a number of sequences and a longest context, both rounded up, so that few graphs serve all
steps. What fills a bucket up writes to the pool's last block. A graph runs the same code as a step without graphs, on
inputs at fixed addresses; it is captured when a step first needs it, most of them before the worker is ready.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.executor.inputs import Ints, StepArrays, StepInputs
from workers.model.decoder import Decoder
from workers.model.feed_forward import Experts
from workers.ops.staging import staged, views_of

MIN_CONTEXT = 1024
STEP = 8  # from 8 sequences on, buckets are multiples of it

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Prepares work for repetition: returns a call that does it again, on the same memory. The work may run before."""


class DecodeGraphs:
    """The captured decodes of one whole model and pool, for steps of up to `max_sequences`.

    Nothing else may use the pool's last block. Owned by a rank; used by its compute thread only.
    """

    def __init__(self, model: Decoder, pool: Tensor, max_sequences: int, capture: Capture) -> None:
        self._model = model
        self._pool = pool
        self._most = max_sequences
        self._capture = capture
        rows = sequences_bucket(max_sequences)
        self._logits = torch.empty(rows, model.config.vocab_size, dtype=model.dtype, device=pool.device)
        self._graphs: dict[tuple[int, int], tuple[Tensor, Work]] = {}  # by bucket: its inputs, and its replay

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The number of sequences and the longest context of each graph; short contexts first."""
        longest = min(self._model.config.context_length, len(self._pool) * self._pool.shape[4])
        contexts = [MIN_CONTEXT]
        while contexts[-1] < longest:
            contexts.append(2 * contexts[-1])
        sizes = sorted({sequences_bucket(sequences) for sequences in range(1, self._most + 1)})
        return [(sequences, context) for context in contexts for sequences in sizes]

    def logits(self, step: StepArrays) -> Tensor | None:
        """[sequences, vocab] if the step decodes one token of each sequence, else None. Valid until the next call."""
        sequences = len(step.contexts)
        is_decode = step.num_decodes == len(step.rows) == sequences <= self._most
        if not is_decode or step.begins is not None or step.adapters:
            return None
        bucket = sequences_bucket(sequences), context_bucket(step.max_context)
        filled = padded(step, *bucket, len(self._pool) - 1, self._pool.shape[4])
        host = staged(filled.all, pin=self._pool.is_cuda)
        graph = self._graphs.get(bucket)
        if graph is None:
            inputs = host.to(self._pool.device)
            replay = self._capture(partial(self._compute, filled.tensors(views_of(inputs, filled.all))))
            graph = self._graphs[bucket] = inputs, replay
        inputs, replay = graph
        inputs.copy_(host, non_blocking=True)
        replay()
        return self._logits[:sequences]

    def _compute(self, inputs: StepInputs) -> None:
        model = self._model
        x = model.embed(inputs.tokens)
        logits = model.logits(model.run(x, inputs.positions, inputs.rows, inputs.batch, self._pool))
        assert logits is not None, "graphs are for whole models"
        self._logits[: len(logits)] = logits


def has_graphs(model: Decoder) -> bool:
    """Whether no layer waits for the device, which a graph cannot: experts that are not grouped do, and torch's SDPA,
    which computes latent attention."""
    config = model.config
    if config.linear is not None or config.latent is not None:
        return False
    return not any(isinstance(layer.feed_forward, Experts) for layer in model.layers)


def padded(step: StepArrays, sequences: int, context: int, block: int, block_size: int) -> StepArrays:
    """The decodes of a step among `sequences`, with tables for `context` tokens; the others use `block`."""
    more = sequences - len(step.contexts)

    def extended(array: Ints, value: int) -> Ints:
        return np.concatenate([array, np.full(more, value, array.dtype)])

    tables = np.full((sequences, -(-context // block_size)), block, np.int32)
    tables[: len(step.tables), : step.tables.shape[1]] = step.tables
    return StepArrays(
        tokens=extended(step.tokens, 0),
        positions=extended(step.positions, 0),
        slots=extended(step.slots, block * block_size),
        rows=np.arange(sequences),
        starts=np.arange(sequences + 1, dtype=np.int32),
        contexts=extended(step.contexts, 1),
        tables=tables,
        begins=None,
        max_query=1,
        max_context=context,
        num_decodes=sequences,
    )


def sequences_bucket(sequences: int) -> int:
    """1, 2, 4, and multiples of 8."""
    return -(-sequences // STEP) * STEP if sequences > STEP // 2 else 1 << (sequences - 1).bit_length()


def context_bucket(context: int) -> int:
    """Powers of two."""
    return max(MIN_CONTEXT, 1 << (context - 1).bit_length())


def cuda_capture() -> Capture:
    """Captures on the current device. All graphs share memory for intermediate results, and one workspace of cuBLAS,
    which keeps 32 MiB for each stream.
    """
    memory: Any = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(work: Work) -> Work:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and creates handles, which a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture
