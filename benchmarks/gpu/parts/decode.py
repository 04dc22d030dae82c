"""Decode of an 8B-shaped Llama at 1k context, by the step that a worker runs: share of memory bandwidth.

With and without CUDA graphs. The floor of a step: its weights and its KV, each read once, at the speed of a copy. As in
a worker whose steps run ahead, a step's arrays are made before the step before it has ended, all but its tokens;
`alone` is a step that makes them itself.
"""

import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.llama import LLAMA_8B, TINY, LlamaShape, filled_pool, random_llama
from benchmarks.gpu.plans import decodes
from benchmarks.gpu.timing import copy_bytes_s, kernel_seconds
from kvtransfer.open import RESERVED_BLOCKS
from workers.engine.step import PENDING
from workers.executor.cuda_graphs import DecodeGraphs, cuda_capture
from workers.executor.inputs import step_arrays
from workers.executor.kv_pool import KVPool
from workers.executor.rank import ModelPart, compute

STEPS = 16
SIZE = 16
BATCHES = (1, 8, 64, 256)


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    shape, context, dtype = (TINY, 40, torch.float32) if tiny else (LLAMA_8B, 1024, torch.bfloat16)
    batches = (1, 2) if tiny else BATCHES
    copy = copy_bytes_s(device, 1 << (16 if tiny else 32))
    blocks = -(-(context + STEPS) // SIZE)
    part = random_llama(shape, device, dtype)
    pool = filled_pool(shape, RESERVED_BLOCKS + batches[-1] * blocks + 1, device, dtype, SIZE)
    order = torch.randperm(batches[-1] * blocks).add(RESERVED_BLOCKS).tolist()
    tables = [tuple(order[row * blocks : (row + 1) * blocks]) for row in range(batches[-1])]
    variants = {"": part}
    if device.type == "cuda":
        variants["_with_graphs"] = replace(
            part, graphs=DecodeGraphs(part.model, pool.blocks, batches[-1], len(pool.blocks) * SIZE, cuda_capture())
        )
    figures: dict[str, object] = {"copy_gb_s": copy / 1e9}
    for rows in batches:
        kv_bytes = rows * context * shape.kv_numbers * dtype.itemsize
        floor_s = ((shape.linear_weights + shape.head_weights) * dtype.itemsize + kv_bytes) / copy
        figures[f"batch_{rows}_floor_ms"] = floor_s * 1e3
        for variant, its_part in variants.items():
            name = f"batch_{rows}{variant}"
            begun = time.perf_counter()
            _step(its_part, pool, shape, context, tables[:rows])
            figures[f"{name}_first_step_ms"] = (time.perf_counter() - begun) * 1e3
            typical, alone = _typical(its_part, pool, shape, context, tables[:rows])
            figures[f"{name}_alone_ms"] = alone * 1e3
            figures[f"{name}_ms"] = typical * 1e3
            figures[f"{name}_tokens_s"] = rows / typical
            figures[f"{name}_share_of_copy"] = floor_s / typical
            if device.type == "cuda":
                kernels = kernel_seconds(partial(_step, its_part, pool, shape, context + STEPS, tables[:rows]))
                device_s = sum(kernels.values())
                figures[f"{name}_outside_device_ms"] = (typical - device_s) * 1e3
                top = sorted(kernels.items(), key=lambda each: -each[1])[:12]
                figures[f"{name}_kernels"] = ", ".join(f"{kernel[:60]} {s * 1e6:.0f} us" for kernel, s in top)
    return figures


def _step(part: ModelPart, pool: KVPool, shape: LlamaShape, context: int, tables: list[tuple[int, ...]]) -> list[int]:
    tokens = [row % shape.vocab for row in range(len(tables))]
    return [token or 0 for token in compute(part, pool, decodes(0, tokens, context, tables, SIZE)).tokens]


def _typical(
    part: ModelPart, pool: KVPool, shape: LlamaShape, context: int, tables: list[tuple[int, ...]]
) -> tuple[float, float]:
    """The median seconds of a step, each of which decodes the tokens of the one before; the second: `alone`."""
    tokens = _step(part, pool, shape, context, tables)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1, STEPS):
        ahead = number % 2 == 0
        plan = decodes(number, [PENDING] * len(tokens) if ahead else tokens, context + number, tables, SIZE)
        arrays = step_arrays(plan, SIZE) if ahead else None
        begun = time.perf_counter()
        if arrays is not None:
            arrays.fill(tokens.__getitem__)
        step = compute(part, pool, plan, arrays=arrays)
        seconds[ahead].append(time.perf_counter() - begun)
        tokens = [token or 0 for token in step.tokens]
    return statistics.median(seconds[True][1:]), statistics.median(seconds[False][2:])
