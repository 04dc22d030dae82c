"""What the CUDA graphs of an 8B-shaped Llama take, against what KV sizing reserves for them: `cuda_graphs.graph_bytes`.

All buckets of `max_running` 256 and the model's whole context. On a CPU nothing is captured, and memory stays as it is.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.llama import CONTEXT, LLAMA_8B, TINY, filled_pool, random_llama
from kvtransfer.open import RESERVED_BLOCKS
from workers.executor.cuda_graphs import Capture, DecodeGraphs, MemoryUse, cuda_capture, cuda_memory_use, graph_bytes

MAX_RUNNING = 256


@torch.inference_mode()
def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if the graphs take more than is reserved."""
    shape, dtype = (TINY, torch.float32) if tiny else (LLAMA_8B, torch.bfloat16)
    on_gpu = device.type == "cuda"
    memory_use = partial(cuda_memory_use, device) if on_gpu else partial(MemoryUse, 0, 0)
    new_capture: Callable[[], Capture] = cuda_capture if on_gpu else lambda: lambda work: work
    model = random_llama(shape, device, dtype).model
    pool = filled_pool(shape, RESERVED_BLOCKS, device, dtype)

    def open_graphs() -> DecodeGraphs:
        return DecodeGraphs(model, pool.blocks, 2 if tiny else MAX_RUNNING, 2048 if tiny else CONTEXT, new_capture())

    begun = time.monotonic()
    reserved = graph_bytes(open_graphs, memory_use)
    measured_s, before = time.monotonic() - begun, memory_use()
    begun = time.monotonic()
    graphs = open_graphs()
    first: MemoryUse | None = None
    for bucket in graphs.buckets:
        graphs.capture(*bucket)
        first = first or memory_use()
    captured_s, after = time.monotonic() - begun, memory_use()
    assert first is not None
    taken = before.free - after.free
    figures: dict[str, object] = {
        "graphs": len(graphs.buckets),
        "reserved_mb": reserved / 1e6,
        "taken_mb": taken / 1e6,
        "shared_by_all_mb": (first.reserved - before.reserved) / 1e6,
        "later_growth_of_shared_mb": (after.reserved - first.reserved) / 1e6,
        "to_measure_s": measured_s,
        "to_capture_s": captured_s,
    }
    if taken > reserved:
        raise AssertionError(f"graphs take {taken / 1e6:.0f} MB, {reserved / 1e6:.0f} MB are reserved: {figures}")
    return figures
