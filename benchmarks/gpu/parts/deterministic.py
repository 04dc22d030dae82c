"""`engine.deterministic` on a device: a row's bits do not depend on its batch, and what that costs."""

import concurrent.futures
import math
import multiprocessing
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.plans import GREEDY
from benchmarks.gpu.timing import graph_seconds_of
from kvtransfer.layout import KVLayout
from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor.cuda_graphs import DecodeGraphs, cuda_capture
from workers.executor.kv_pool import KVPool, allocate_pool
from workers.executor.rank import ModelPart, compute
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.ops import triton_linear
from workers.ops.attention import best_attention

LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # [out, in] of Llama 3.1 8B
HEAD = (128256, 4096)
ROWS, TIMED_ROWS = 300, (1, 8, 64, 2048)
BATCHES = ((0, 2), (1, 4), (5, 13), (60, 76), (7, 72), (100, 228), (171, 300), (20, 284))
ALONE = (0, 1, 17, 63, 64, 130, 299)
FAMILIES = ("llama 3", "gemma 2", "mixtral", "qwen 2 moe")
LENGTHS, NEW, BLOCK = (70, 33, 130, 300), 24, 16


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a bit of a linear layer's row, a token or the KV of a model differs."""
    families = FAMILIES[:1] if tiny else FAMILIES
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(families), context) as pool:
        models = [pool.submit(_model_is_invariant, name, str(device), tiny) for name in families]
        for shape in [(70, 40), (9, 600)] if tiny else [*LAYER, HEAD]:
            _rows_are_invariant(shape, device, torch.float32 if tiny else torch.bfloat16)
        if not tiny:
            _rows_are_invariant((1100, 2050), device, torch.float32)
            _rows_are_invariant((1100, 2050), device, torch.float16)
        tokens = [each.result() for each in models]
    figures: dict[str, object] = {"families": ", ".join(families), "equal_tokens": sum(tokens)}
    for name, shapes in (("layer", [(70, 40)] if tiny else LAYER), ("head", [(9, 60)] if tiny else [HEAD])):
        for rows in TIMED_ROWS[:2] if tiny else TIMED_ROWS:
            figures |= _times(f"{name}_{rows}", shapes, rows, device, torch.float32 if tiny else torch.bfloat16)
    return figures


def _numbers(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On a CPU whole numbers: a product in Triton's interpreter is numpy's, whose rounding depends on the batch."""
    numbers = torch.randn(rows, columns, device=device)
    return (4 * numbers).round() if device.type == "cpu" else numbers.to(dtype)


def _rows_are_invariant(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
    """Rows alone and in batches have the bits that they have among `ROWS`, which are right."""
    weight, x = _numbers(*shape, device, dtype), _numbers(ROWS, shape[1], device, dtype)
    bias = _numbers(1, shape[0], device, dtype)[0]
    whole = triton_linear.linear(x, weight, bias)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    error = float((whole.double() - wanted).norm() / wanted.norm())
    if not error < (1e-6 if dtype == torch.float32 else 3e-3):
        raise AssertionError(f"linear {shape} in {dtype}: relative error {error:.2e}")
    for first, stop in [*((row, row + 1) for row in ALONE), *BATCHES]:
        part = triton_linear.linear(x[first:stop], weight, bias)
        if differ := int((part != whole[first:stop]).any(1).sum()):
            raise AssertionError(f"linear {shape} in {dtype}: {differ} rows of {first}..{stop} have other bits")


def _times(
    name: str, shapes: Sequence[tuple[int, int]], rows: int, device: torch.device, dtype: torch.dtype
) -> dict[str, object]:
    """Microseconds of all shapes, one after another, and relative to F.linear."""
    pairs = [(_numbers(rows, size, device, dtype), _numbers(out, size, device, dtype)) for out, size in shapes]
    ours = graph_seconds_of(lambda: [triton_linear.linear(x, weight, None) for x, weight in pairs], device)
    theirs = graph_seconds_of(lambda: [F.linear(x, weight) for x, weight in pairs], device)
    return {f"{name}_us": 1e6 * ours, f"{name}_time_of_f_linear": ours / theirs}


def _model_is_invariant(name: str, device: str, tiny: bool) -> int:
    """The number of tokens compared: prompts alone and whole, against in chunks and beside others, with graphs."""
    from tests.model.families import write_family

    torch.set_num_threads(1)
    torch.manual_seed(0)
    where = torch.device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    rng = random.Random(1)
    lengths = LENGTHS[:2] if tiny else LENGTHS
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]
    attention = best_attention(where, dtype, deterministic=True)
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder) / "model", name)
        model = load_decoder(ModelFolder("tiny", path), where, dtype, attention=attention, deterministic=True)
        config = model.config
        layout = KVLayout("tiny", config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, str(dtype)[6:])
        sizes = [math.ceil((length + NEW) / BLOCK) for length in lengths]
        pool = allocate_pool(layout, 3 + 2 * sum(sizes), where)
        free = rng.sample(range(2, 2 + 2 * sum(sizes)), 2 * sum(sizes))
        first, second = ([tuple(free.pop() for _ in range(size)) for size in sizes] for _ in range(2))
        alone = [
            _answers(ModelPart(model), pool, [prompt], [table], (len(prompt),))[0]
            for prompt, table in zip(prompts, first, strict=True)
        ]
        has_graphs = where.type == "cuda" and config.experts is None  # experts that are not grouped wait
        graphs = (
            DecodeGraphs(model, pool.blocks, len(prompts), len(pool.blocks) * BLOCK, cuda_capture())
            if has_graphs
            else None
        )
        together = _answers(ModelPart(model, graphs=graphs), pool, prompts, second, (50, 7, 64, 33))
    if alone != together:
        raise AssertionError(f"{name}: tokens alone {alone}, together {together}")
    for length, one, other in zip(lengths, first, second, strict=True):
        if not torch.equal(_kv(pool, one, length + NEW - 1), _kv(pool, other, length + NEW - 1)):
            raise AssertionError(f"{name}: the KV of a prompt of {length} tokens has other bits in a batch")
    return NEW * len(prompts)


def _kv(pool: KVPool, table: tuple[int, ...], num_tokens: int) -> Tensor:
    """Bits of the first tokens' KV, token by token."""
    blocks = pool.blocks[list(table)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
    return blocks[:num_tokens].contiguous().view(torch.uint8)


def _answers(
    part: ModelPart,
    pool: KVPool,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[tuple[int, ...]],
    chunks: Sequence[int],
) -> list[list[int]]:
    """`NEW` greedy tokens of each prompt, which is computed in chunks of its own size beside the others' steps."""
    tokens, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while any(len(each) < len(prompt) + NEW for each, prompt in zip(tokens, prompts, strict=True)):
        step = []
        for row, (each, prompt) in enumerate(zip(tokens, prompts, strict=True)):
            if len(each) == len(prompt) + NEW:
                continue
            end = min(done[row] + chunks[row], len(each))
            draw = Draw(GREEDY, seed=0, position=end) if end == len(each) else None
            run = tuple(each[done[row] : end])
            step.append((row, Chunk(str(row), run, done[row], tables[row][: math.ceil(end / BLOCK)], draw)))
        step.sort(key=lambda each: len(each[1].tokens) > 1)
        result = compute(part, pool, StepPlan(1, tuple(chunk for _, chunk in step)))
        for (row, chunk), token in zip(step, result.tokens, strict=True):
            done[row] += len(chunk.tokens)
            if chunk.draw is not None:
                assert token is not None, "logits were not finite"
                tokens[row].append(token)
    return [each[len(prompt) :] for each, prompt in zip(tokens, prompts, strict=True)]
