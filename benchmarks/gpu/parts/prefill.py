"""Prompts of an 8B-shaped Llama, by the step that a worker runs: share of a matrix product's FLOP/s."""

import random
import statistics
import time

import torch

from benchmarks.gpu.llama import LLAMA_8B, TINY, filled_pool, random_llama
from benchmarks.gpu.plans import prompt
from benchmarks.gpu.timing import matmul_flop_s
from workers.executor.rank import compute

ROUNDS = 5


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    shape, dtype, size = (TINY, torch.float32, 16) if tiny else (LLAMA_8B, torch.bfloat16, 16)
    flops = matmul_flop_s(device, 64 if tiny else 8192, dtype)
    part = random_llama(shape, device, dtype)
    figures: dict[str, object] = {"matmul_tflop_s": flops / 1e12}
    longest = 64 if tiny else 8192
    pool = filled_pool(shape, 1 + longest // size, device, dtype, size)
    table = tuple(torch.randperm(longest // size).add(1).tolist())
    tokens = [random.randrange(shape.vocab) for _ in range(longest)]
    for length, chunk in ((32, 32), (64, 32)) if tiny else ((2048, 2048), (8192, 8192), (8192, 2048)):
        seconds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for first in range(0, length, chunk):
                last = first + chunk >= length
                compute(part, pool, prompt(tokens[first : first + chunk], first, table, size, last=last))
            seconds.append(time.perf_counter() - begun)
        typical = statistics.median(seconds[1:])
        attention = 2 * length * length * shape.heads * shape.head_dim * shape.layers  # causal: half of 4
        work = 2 * shape.linear_weights * length + 2 * shape.head_weights + attention
        name = f"prompt_{length}" + (f"_in_chunks_of_{chunk}" if chunk < length else "")
        figures[f"{name}_ms"] = typical * 1e3
        figures[f"{name}_tokens_s"] = length / typical
        figures[f"{name}_share_of_matmul"] = work / typical / flops
    return figures
