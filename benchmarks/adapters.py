"""What LoRA adapters cost: a step of 16 decodes, or of one prompt, with some adapters beside the same step with none.

    python -m benchmarks.adapters [ROUNDS]

A Llama of SmolLM2-135M's shape with random weights, float32 on this machine's CPU; adapters of rank 16 on all seven
linear layers. Rows take turns over the adapters. The native kernel beside a loop of torch's products. Two minutes.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.llama import LlamaShape, filled_pool, random_llama
from kvtransfer.probe import SCRATCH_BLOCK
from workers.engine.step import Chunk, StepPlan
from workers.executor.inputs import step_arrays
from workers.executor.rank import ModelPart
from workers.ops import lora
from workers.ops.lora import DOWN, GATE_UP, OUTPUT, QKV, LayerChanges, LinearChange, LowRank, StepAdapters
from workers.ops.native.library import library

SHAPE = LlamaShape(30, 576, 1536, 9, 3, 64, 49_152)
CPU = torch.device("cpu")
RANK, ROUNDS, CONTEXT, BLOCK = 16, 15, 64, 16
ROWS = {"16 decodes": (16, 1), "prompt of 128": (1, 128)}  # (sequences, tokens of each)
NUMBERS = (0, 1, 4, 16)


def random_adapter() -> tuple[LayerChanges, ...]:
    def change(columns: int, *outs: int) -> LinearChange:
        firsts = np.cumsum([0, *outs])
        made = [(torch.randn(RANK, columns), torch.randn(out, RANK) / 100) for out in outs]
        return LinearChange(tuple(LowRank.of(a, b, int(first)) for (a, b), first in zip(made, firsts, strict=False)))

    heads, kv_heads = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    return tuple(
        {
            QKV: change(SHAPE.hidden, heads, kv_heads, kv_heads),
            OUTPUT: change(heads, SHAPE.hidden),
            GATE_UP: change(SHAPE.hidden, SHAPE.ffn, SHAPE.ffn),
            DOWN: change(SHAPE.ffn, SHAPE.hidden),
        }
        for _ in range(SHAPE.layers)
    )


@torch.inference_mode()
def step_seconds(part: ModelPart, rows: tuple[int, int], adapters: Sequence[tuple[LayerChanges, ...]]) -> float:
    sequences, tokens = rows
    first = CONTEXT if tokens == 1 else 0
    blocks = (SCRATCH_BLOCK,) * -(-(first + tokens) // BLOCK)
    plan = StepPlan(0, tuple(Chunk(f"{each}", (1,) * tokens, first, blocks, None) for each in range(sequences)))
    arrays = step_arrays(plan, BLOCK)
    last = np.cumsum([tokens] * sequences) - 1
    changes = None
    begun_s = time.perf_counter()
    if adapters:
        numbers = np.repeat(np.arange(sequences, dtype=np.int32) % len(adapters), tokens)
        changes = StepAdapters(adapters, numbers, last, CPU, deterministic=False)
    inputs = arrays.tensors([torch.from_numpy(each) for each in arrays.all])
    x = part.model.embed(inputs.tokens)
    x = part.model.run(x, inputs.positions, torch.from_numpy(last), inputs.batch, POOL.blocks, None, changes)
    part.model.logits(x)
    return time.perf_counter() - begun_s


POOL = filled_pool(SHAPE, 3, CPU, torch.float32, BLOCK)


def main(rounds: int) -> None:
    part, adapters = random_llama(SHAPE, CPU, torch.float32), [random_adapter() for _ in range(max(NUMBERS))]
    print(f"{torch.get_num_threads()} threads, medians of {rounds} interleaved rounds\n")
    print("| step | adapters | native kernel | torch | ms without |\n|---|---:|---:|---:|---:|")
    for name, rows in ROWS.items():
        taken: dict[tuple[int, str], list[float]] = {}
        for _ in range(rounds + 1):
            for number in NUMBERS if rows[0] > 1 else NUMBERS[:2]:
                for by in ("native", "torch"):
                    with patch.object(lora, "library", library if by == "native" else lambda: None):
                        taken.setdefault((number, by), []).append(step_seconds(part, rows, adapters[:number]))
        median = {key: statistics.median(each[1:]) for key, each in taken.items()}  # the first round warms up
        for number in sorted({number for number, _ in median} - {0}):
            native, torch_s = (median[number, by] / median[0, by] for by in ("native", "torch"))
            print(f"| {name} | {number} | {native:.2f}x | {torch_s:.2f}x | {1000 * median[0, 'native']:.1f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
