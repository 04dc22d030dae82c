"""A worker that has just become ready: no step of a request waits for Triton or captures a graph.

On a GPU the worker sizes its KV pool itself, so it fills the device.
"""

import asyncio
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.llama import TINY
from benchmarks.gpu.model_folder import LLAMA_1B, write_model
from benchmarks.gpu.plans import mixed
from benchmarks.gpu.served import SHARED_MEMORY
from kvtransfer.open import RESERVED_BLOCKS
from workers.config import ByteSize, CacheConfig, EngineConfig, TransferConfig, WorkerConfig
from workers.executor.kv_pool import memory_of
from workers.executor.rank_loader import open_solo
from workers.model.folder import ModelFolder

STEPS = 40
BLOCKS = 600


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a kernel is compiled, or loaded from Triton's cache, or a graph captured after the worker is ready."""
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # as on a new machine
        shape, dtype = (TINY, torch.float32) if tiny else (LLAMA_1B, torch.bfloat16)
        model = write_model(Path(folder) / "model", shape, device, dtype, 4096)
        for deterministic in (False,) if tiny else (False, True):
            name = "deterministic_" if deterministic else ""
            found = asyncio.run(
                _measured(model, device, str(dtype).removeprefix("torch."), deterministic=deterministic)
            )
            figures |= {name + figure: value for figure, value in found.items()}
    return figures


class CountedGraph(torch.cuda.graph):
    """As `torch.cuda.graph`, which captures; counts the captures."""

    captures = 0

    def __enter__(self) -> None:
        CountedGraph.captures += 1
        super().__enter__()


async def _measured(model: Path, device: torch.device, dtype: str, *, deterministic: bool) -> dict[str, object]:
    from triton import knobs

    compiled: list[str] = []

    def note(**given: object) -> None:
        compiled.append(str(given.get("repr")))

    knobs.runtime.jit_post_compile_hook = note
    setattr(torch.cuda, "graph", CountedGraph)  # noqa: B010
    CountedGraph.captures = 0
    on_gpu = device.type == "cuda"
    sizes = EngineConfig(
        kv_blocks=0 if on_gpu else BLOCKS,
        max_running=64,
        device=str(device),
        dtype=dtype,
        deterministic=deterministic,
        threads=1,
    )
    transfer = TransferConfig(("cuda_ipc",) if on_gpu else ("tcp",), host="127.0.0.1")
    cache = CacheConfig(host=ByteSize(0))  # to pin a large one takes seconds
    config = WorkerConfig("first", "first", str(model), sizes, transfer=transfer, cache=cache, secret="of this part")
    begun_s = time.monotonic()
    executor = await open_solo(config, ModelFolder("first", model), "first-1")
    ready_s, before, graphs = time.monotonic() - begun_s, len(compiled), CountedGraph.captures
    print(f"ready after {ready_s:.1f} s: {before} variants, {graphs} graphs", flush=True)  # if the part is cut off
    free_bytes, total_bytes = memory_of(device)
    try:
        plans = list(mixed(STEPS, range(RESERVED_BLOCKS, BLOCKS), sizes.block_size))
        first, again = [[(await executor.execute(plan)).seconds for plan in plans] for _ in range(2)]
    finally:
        await executor.close()
    del executor
    gc.collect()
    torch.cuda.empty_cache()  # so that the next worker finds the device's memory free
    if compiled[before:]:
        raise AssertionError(f"compiled after the start: {compiled[before:]}")
    if CountedGraph.captures > graphs:
        raise AssertionError(f"{CountedGraph.captures - graphs} graphs captured after the start")
    return {
        "ready_s": ready_s,
        "graphs_captured": graphs,
        "variants_of_kernels": before,
        "used_share_of_memory": 1 - free_bytes / total_bytes,
        "longest_first_step_ms": 1e3 * max(first),
        "median_step_ms": 1e3 * statistics.median(again),
    }
