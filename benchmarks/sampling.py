"""What the sampler costs by temperature and filters: CPU time of one thread for a row of logits, the least of many.

python -m benchmarks.sampling [VOCABULARY]

The rows are normal scores with some favorites. The least of many, in CPU time, hardly shows other jobs of the machine.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from workers.engine.step import Draw
from workers.executor.sampler import sample
from workers.request import SamplingParams

TEMPERATURES = (1.0, 0.7, 0.3, 0.1, 0.05, 0.01)
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "both": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
ROWS, ROUNDS, FAVORITES = 8, 15, 50


def rows_of(vocab_size: int) -> torch.Tensor:
    """Logits [row, vocab]."""
    generator = np.random.default_rng(0)
    rows = 3 * generator.standard_normal((ROWS, vocab_size), dtype=np.float32)
    rows[:, :FAVORITES] += 12 * generator.random((ROWS, FAVORITES), dtype=np.float32)
    return torch.from_numpy(rows)


def microseconds(rows: torch.Tensor, params: SamplingParams) -> float:
    """Of one row."""
    draws = [Draw(params, seed, position=7) for seed in range(len(rows))]
    took = []
    for _ in range(ROUNDS):
        begun = time.thread_time_ns()
        sample(rows, draws)
        took.append(time.thread_time_ns() - begun)
    return min(took) / len(rows) / 1e3


def main(arguments: Sequence[str]) -> None:
    vocab_size = int(arguments[0]) if arguments else 49_152
    torch.set_num_threads(1)
    rows = rows_of(vocab_size)
    print(f"| temperature | {' | '.join(FILTERS)} |")
    print("|---|" + "---|" * len(FILTERS))
    for temperature in TEMPERATURES:
        took = [
            microseconds(rows, SamplingParams(temperature=temperature, **filters))  # type: ignore[arg-type]
            for filters in FILTERS.values()
        ]
        print(f"| {temperature} | " + " | ".join(f"{each:.0f}" for each in took) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
