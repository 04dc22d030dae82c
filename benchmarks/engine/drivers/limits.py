"""Measures this machine's limits: memory read bandwidth and rates of matrix products.

The best of several tries counts, so that other processes do not lower a limit.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.engine.drivers.protocol import Task, driver_config, serve

READ_BYTES = 512 << 20  # as many as the float32 weights of the measured model
PREFILL_SHAPE = (1024, 576, 1536)
SQUARE_SHAPE = (1024, 1024, 1024)
TRIES = 7
GEMM_S = 0.2  # time for the tries of one product


def measure(threads: int) -> dict[str, float]:
    """Limits by name, in bytes or operations per second."""
    found = {f"read {count}": _read_rate(count) for count in sorted({1, threads})}
    torch.set_num_threads(threads)
    for shape in (PREFILL_SHAPE, SQUARE_SHAPE):
        name = "x".join(map(str, shape))
        found[f"float32 {name}"] = _linear_rate(torch.float32, shape)
        found[f"bfloat16 {name}"] = _linear_rate(torch.bfloat16, shape)
    found["int8 " + "x".join(map(str, SQUARE_SHAPE))] = _int8_rate(SQUARE_SHAPE)
    return found


def _read_rate(threads: int) -> float:
    torch.set_num_threads(threads)
    numbers = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(_seconds(numbers.sum) for _ in range(TRIES))


def _linear_rate(dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    rows, inner, columns = shape
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    return _product_rate(lambda: F.linear(x, weight), shape)


def _int8_rate(shape: tuple[int, int, int]) -> float:
    rows, inner, columns = shape
    x = torch.randint(-100, 100, (rows, inner), dtype=torch.int8)
    weight = torch.randint(-100, 100, (columns, inner), dtype=torch.int8)
    return _product_rate(lambda: torch._int_mm(x, weight.T), shape)


def _product_rate(product: Callable[[], object], shape: tuple[int, int, int]) -> float:
    product()
    best_s, begun = _seconds(product), time.perf_counter()
    while time.perf_counter() - begun < GEMM_S:
        best_s = min(best_s, _seconds(product))
    return 2 * shape[0] * shape[1] * shape[2] / best_s


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    threads = driver_config().threads

    def answer(_: Task) -> dict[str, float]:
        return measure(threads)

    serve(answer)
