"""CUDA graphs of decode steps: one launch replaces those of all layers, whose host time exceeds the device's.

A graph computes a bucket: a number of sequences and a longest context, both rounded up, so that few graphs serve all
steps. What fills a bucket up writes to the pool's last block. A graph runs the same code as a step without graphs, on
inputs at fixed addresses; it is captured when a step first needs it, most of them before the worker is ready. All
graphs of a worker share their inputs, their logits and their memory for intermediate results.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.engine.step import Chunk, StepPlan
from workers.executor.inputs import Ints, StepArrays, StepInputs, step_arrays
from workers.model.decoder import Decoder
from workers.model.feed_forward import Experts
from workers.ops.staging import num_bytes, staged, views_of

MIN_CONTEXT = 1024
STEP = 8  # from 8 sequences on, buckets are multiples of it
SAMPLES = 8  # graphs that are captured to measure what one takes of the driver's memory
PAGE_BYTES = 2 << 20  # the driver takes a device's memory in such pieces

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Prepares work for repetition: returns a call that does it again, on the same memory. The work may run before."""


class DecodeGraphs:
    """The captured decodes of one whole model and pool, for steps of up to `max_sequences` and `max_context` tokens.

    Nothing else may use the pool's last block. Owned by a rank; used by its compute thread only.
    """

    def __init__(self, model: Decoder, pool: Tensor, max_sequences: int, max_context: int, capture: Capture) -> None:
        self._model = model
        self._pool = pool
        self._most = max_sequences
        self._longest = context_bucket(min(model.config.context_length, max_context))
        self._capture = capture
        rows = sequences_bucket(max_sequences)
        self._logits = torch.empty(rows, model.config.vocab_size, dtype=model.dtype, device=pool.device)
        largest = self._filling(rows, self._longest).all
        self._inputs = torch.empty(num_bytes(largest), dtype=torch.uint8, device=pool.device)
        self._graphs: dict[tuple[int, int], Work] = {}  # replays, by bucket

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The number of sequences and the longest context of each graph, in the order to capture them.

        The largest comes first, and many sequences before few: a graph reuses the memory of those before it where it
        fits in. After the first, short contexts, which are the most frequent.
        """
        contexts = [MIN_CONTEXT]
        while contexts[-1] < self._longest:
            contexts.append(2 * contexts[-1])
        sizes = sorted({sequences_bucket(sequences) for sequences in range(1, self._most + 1)}, reverse=True)
        largest = sizes[0], self._longest
        return [largest, *((size, each) for each in contexts for size in sizes if (size, each) != largest)]

    def logits(self, step: StepArrays) -> Tensor | None:
        """[sequences, vocab] if the step decodes one token of each sequence, else None. Valid until the next call."""
        sequences = len(step.contexts)
        is_decode = step.num_decodes == len(step.rows) == sequences <= self._most
        bucket = sequences_bucket(sequences), context_bucket(step.max_context)
        if not is_decode or bucket[1] > self._longest or step.begins is not None or step.adapters:
            return None
        if bucket not in self._graphs:
            self.capture(*bucket)
        filled = padded(step, *bucket, len(self._pool) - 1, self._pool.shape[4])
        self._set(filled)
        self._graphs[bucket]()
        return self._logits[:sequences]

    def capture(self, sequences: int, context: int) -> None:
        """Capture the graph of this bucket."""
        filling = self._filling(sequences, context)
        self._set(filling)
        inputs = filling.tensors(views_of(self._inputs, filling.all))
        self._graphs[sequences, context] = self._capture(partial(self._compute, inputs))

    def _filling(self, sequences: int, context: int) -> StepArrays:
        """Inputs of a bucket that write to nothing but the pool's last block."""
        block, block_size = len(self._pool) - 1, self._pool.shape[4]
        one = step_arrays(StepPlan(0, (Chunk("filling", (0,), 0, (block,), None),)), block_size)
        return padded(one, sequences, context, block, block_size)

    def _set(self, step: StepArrays) -> None:
        host = staged(step.all, pin=self._pool.is_cuda)
        self._inputs[: len(host)].copy_(host, non_blocking=True)

    def _compute(self, inputs: StepInputs) -> None:
        model = self._model
        x = model.embed(inputs.tokens)
        logits = model.logits(model.run(x, inputs.positions, inputs.rows, inputs.batch, self._pool))
        assert logits is not None, "graphs are for whole models"
        self._logits[: len(logits)] = logits


def has_graphs(model: Decoder) -> bool:
    """Whether no layer waits for the device, which a graph cannot: experts that are not grouped do, and torch's
    attention."""
    if model.config.linear is not None or model.attention.waits:
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


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a device: bytes that torch has reserved for this process, and bytes that nothing has allocated."""

    reserved: int
    free: int


@torch.inference_mode()
def graph_bytes(open_graphs: Callable[[], DecodeGraphs], memory_use: Callable[[], MemoryUse]) -> int:
    """Bytes of the device that the graphs of all buckets take; `open_graphs` makes them over a small pool.

    The first graph reserves what all of them share, and each takes memory of the driver besides. That is a median of
    SAMPLES, since other processes may allocate meanwhile. vLLM measures it like this, SGLang leaves a constant share.
    """
    before = memory_use()
    graphs = open_graphs()
    largest, *others = graphs.buckets
    graphs.capture(*largest)
    uses = [memory_use()]
    for bucket in others[:SAMPLES]:
        graphs.capture(*bucket)
        uses.append(memory_use())
    taken = [earlier.free - later.free for earlier, later in pairwise(uses)]
    of_one = max(PAGE_BYTES, int(statistics.median(taken or [0])))
    return uses[0].reserved - before.reserved + len(graphs.buckets) * of_one


def cuda_memory_use(device: torch.device) -> MemoryUse:
    """Memory use of the device, without memory that torch caches."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return MemoryUse(torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0])


@cache
def _capture_stream(device: int) -> Any:
    """The capture stream of a device, for all captures: cuBLAS keeps a workspace of 32 MiB for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def cuda_capture() -> Capture:
    """A `Capture` on the current device. All graphs of one `Capture` share memory for intermediate results. A handle of
    such memory must not be used again once its graphs are gone, so each `Capture` has its own.
    """
    memory: Any = torch.cuda.graph_pool_handle()
    stream = _capture_stream(torch.cuda.current_device())

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
