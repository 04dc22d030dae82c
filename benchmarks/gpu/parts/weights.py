"""fp8 weights against bfloat16 ones: right, how many tokens stay the same, and how long steps of an 8B shape take.

The first figures are checks: rows are rounded as on a CPU, and products are those of the rounded rows.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.llama import LLAMA_8B, TINY, LlamaShape, filled_pool, random_llama
from benchmarks.gpu.plans import decodes, greedy, prompt
from benchmarks.gpu.timing import graph_seconds_of, kernel_seconds
from kvtransfer.open import RESERVED_BLOCKS
from workers.executor.cuda_graphs import DecodeGraphs, cuda_capture
from workers.executor.kv_pool import KVPool
from workers.executor.rank import ModelPart, compute
from workers.ops import narrow
from workers.ops.linear.fp8 import FP8Linear, check_fp8, multiply, rounded_rows

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (48, 80))  # the last one small and odd
CHECKED_ROWS = (1, 2, 3, 8, 17, 64, 100, 512)
TIMED_ROWS = (1, 8, 64, 2048)
BATCHES, CONTEXT, STEPS, BLOCK = (1, 8, 64), 1024, 12, 16
SMALL = LlamaShape(4, 1024, 2816, 8, 4, 128, 32000)
FORMATS = {"plain": "float32", "fp8": "fp8"}


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a product is wrong, or rows are not rounded as on a CPU."""
    dtype = torch.float32 if tiny else torch.bfloat16
    if device.type == "cuda":
        check_fp8(device, dtype)
    torch.manual_seed(0)
    figures = _errors(SHAPES[-1:] if tiny else SHAPES, device, dtype)
    figures |= _agreement(TINY if tiny else SMALL, device, dtype)
    figures |= _linear_times(SHAPES[-1:] if tiny else SHAPES[:4], TIMED_ROWS[:2] if tiny else TIMED_ROWS, device, dtype)
    return figures | _step_times(TINY if tiny else LLAMA_8B, device, dtype, tiny=tiny)


def _errors(shapes: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """The largest relative error of all shapes and rows, in the norm: of a product, and of a sum kept in fewer bits.

    The same for rounding: how far the product of rounded rows is from the exact one.
    """
    product, rounding, other_bits = [], [], []
    for out, size in shapes:
        weight, bias = torch.randn(out, size, device=device).to(dtype), torch.randn(out, device=device).to(dtype)
        linear = FP8Linear(weight, bias)
        for rows in CHECKED_ROWS:
            x = torch.randn(rows, 2 * size, device=device).to(dtype)[:, :size]  # rows are apart
            x *= torch.logspace(-2, 2, rows, device=device).to(dtype)[:, None]
            numbers, scales = rounded_rows(x)
            theirs, their_scales = narrow.rounded_rows(x.float().cpu(), torch.float8_e4m3fn)
            torch.testing.assert_close(scales.cpu(), their_scales, rtol=1e-6, atol=0.0)
            other_bits.append(float((numbers.cpu().view(torch.uint8) != theirs.view(torch.uint8)).float().mean()))
            meant = numbers.float() * scales
            wanted = _exact(meant, linear.weight.float() * linear.scales.t(), bias)
            product.append(_error(linear(x), wanted))
            rounding.append(_error(wanted, _exact(x, weight, bias)))
    if not (max(product) < 0.01 and max(other_bits) < 1e-3):
        raise AssertionError(
            f"a product of rounded rows has a relative error of {max(product):.2e}; {max(other_bits):.2e} of the "
            "numbers are not those of a CPU"
        )
    figures: dict[str, object] = {"product_error": max(product), "rounding_error": max(rounding)}
    return figures | {"numbers_unlike_a_cpus_share": max(other_bits)}


def _exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.double(), weight.double(), bias.double())


def _error(found: Tensor, wanted: Tensor) -> float:
    """The largest of all rows."""
    return float(((found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def _agreement(shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """The share of greedy tokens that fp8 weights leave as they are; a random model's candidates lie close together."""
    rng = random.Random(0)
    prompts = [[rng.randrange(shape.vocab) for _ in range(rng.randrange(20, 40))] for _ in range(32)]
    blocks = RESERVED_BLOCKS + len(prompts) * 4
    answers = {
        name: greedy(
            random_llama(shape, device, dtype, weight_format),
            filled_pool(shape, blocks, device, dtype, BLOCK), prompts, 8, 64, RESERVED_BLOCKS,
        )
        for name, weight_format in FORMATS.items()
    }  # fmt: skip
    pairs = list(zip(answers["plain"], answers["fp8"], strict=True))
    equal = [one == other for pair in pairs for one, other in zip(*pair, strict=True)]
    return {
        "equal_first_tokens_share": statistics.mean(ours[0] == theirs[0] for ours, theirs in pairs),
        "equal_tokens_share": statistics.mean(equal),
    }


def _linear_times(
    shapes: tuple[tuple[int, int], ...], all_rows: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> dict[str, object]:
    """Microseconds of a layer's products, one after another, and relative to F.linear; of rounding x alone too."""
    weights = [torch.randn(out, size, device=device).to(dtype) for out, size in shapes]
    linears = [FP8Linear(weight) for weight in weights]
    figures: dict[str, object] = {}
    for rows in all_rows:
        xs = [torch.randn(rows, size, device=device).to(dtype) for _, size in shapes]
        rounded = [rounded_rows(x) for x in xs]
        calls: dict[str, partial[Any]] = {
            "plain": partial(_each, F.linear, xs, weights),
            "fp8": partial(_each, _apply, linears, xs),
            "rounding": partial(_each, rounded_rows, xs),
        }
        if device.type == "cuda":
            calls["product"] = partial(_each, partial(_product, dtype=dtype), rounded, linears)
        seconds = {name: graph_seconds_of(call, device) for name, call in calls.items()}
        figures |= {f"linear_{rows}_{name}_us": 1e6 * each for name, each in seconds.items()}
        figures[f"linear_{rows}_time_of_f_linear"] = seconds["fp8"] / seconds["plain"]
    return figures


def _each(function: Callable[..., object], *arguments: Iterable[object]) -> None:
    for each in zip(*arguments, strict=True):
        function(*each)


def _apply(linear: FP8Linear, x: Tensor) -> Tensor:
    return linear(x)


def _product(rounded: tuple[Tensor, Tensor], linear: FP8Linear, dtype: torch.dtype) -> Tensor:
    return multiply(*rounded, linear, dtype)


def _step_times(shape: LlamaShape, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> dict[str, object]:
    """Milliseconds of decodes, with CUDA graphs, and of a prompt; GiB of the weights."""
    batches, context, length = ((1, 2), 40, 48) if tiny else (BATCHES, CONTEXT, 2048)
    blocks = -(-(context + STEPS) // BLOCK)
    count = max(batches[-1] * blocks, length // BLOCK)
    figures: dict[str, object] = {}
    for name, weight_format in FORMATS.items():
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        part = random_llama(shape, device, dtype, weight_format)
        pool = filled_pool(shape, RESERVED_BLOCKS + count + 1, device, dtype, BLOCK)
        order = torch.randperm(count).add(RESERVED_BLOCKS).tolist()
        tables = [tuple(order[row * blocks : (row + 1) * blocks]) for row in range(batches[-1])]
        if device.type == "cuda":
            num_bytes = torch.cuda.memory_allocated(device) - before - pool.blocks.nbytes
            figures[f"{name}_weights_gib"] = num_bytes / 2**30
            part = replace(part, graphs=DecodeGraphs(part.model, pool.blocks, batches[-1], cuda_capture()))
        for rows in batches:
            figures[f"decode_{rows}_{name}_ms"] = 1e3 * _decode_seconds(part, pool, shape, context, tables[:rows])
        if device.type == "cuda":
            step = partial(compute, part, pool, decodes(0, [1], context, tables[:1], BLOCK))
            top = sorted(kernel_seconds(step).items(), key=lambda each: -each[1])[:8]
            figures[f"decode_1_{name}_kernels"] = ", ".join(f"{kernel[:60]} {s * 1e6:.0f} us" for kernel, s in top)
        tokens = [random.randrange(shape.vocab) for _ in range(length)]
        plan = prompt(tokens, 0, tuple(order[: length // BLOCK]), BLOCK)
        figures[f"prompt_{length}_{name}_ms"] = 1e3 * _median_seconds([partial(compute, part, pool, plan)] * 6)
        del part, pool
    for what in (*(f"decode_{rows}" for rows in batches), f"prompt_{length}"):
        figures[f"{what}_time_of_plain"] = float(str(figures[f"{what}_fp8_ms"])) / float(
            str(figures[f"{what}_plain_ms"])
        )
    return figures


def _decode_seconds(
    part: ModelPart, pool: KVPool, shape: LlamaShape, context: int, tables: list[tuple[int, ...]]
) -> float:
    tokens = [row % shape.vocab for row in range(len(tables))]
    plans = [decodes(number, tokens, context + number, tables, BLOCK) for number in range(STEPS)]
    return _median_seconds([partial(compute, part, pool, plan) for plan in plans])


def _median_seconds(calls: list[partial[Any]]) -> float:
    """Of all but the first three, which compile and capture."""
    seconds = []
    for call in calls:
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[3:])
