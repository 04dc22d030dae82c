"""transformers beside our steps, on the same device with the same shapes: decode at 1k context, and whole prompts.

transformers runs as it does without settings: SDPA attention, a dense cache, no CUDA graphs.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.llama import LLAMA_8B, TINY, LlamaShape, filled_pool, random_llama
from benchmarks.gpu.plans import decodes, prompt
from kvtransfer.open import RESERVED_BLOCKS
from workers.executor.cuda_graphs import DecodeGraphs, cuda_capture
from workers.executor.rank import ModelPart, compute

SIZE = 16
ROUNDS = 8


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    shape, dtype = (TINY, torch.float32) if tiny else (LLAMA_8B, torch.bfloat16)
    batches, context, lengths = ((1, 2), 40, (32,)) if tiny else ((1, 8, 64), 1024, (2048, 8192))
    theirs = _transformers(shape, device, dtype, batches, context, lengths)
    ours = _ours(shape, device, dtype, batches, context, lengths)
    figures: dict[str, object] = {}
    for name, seconds in ours.items():
        figures[f"{name}_ms"] = seconds * 1e3
        figures[f"{name}_transformers_ms"] = theirs[name] * 1e3
        figures[f"{name}_time_of_transformers"] = seconds / theirs[name]
    return figures


@torch.inference_mode()
def _transformers(
    shape: LlamaShape,
    device: torch.device,
    dtype: torch.dtype,
    batches: tuple[int, ...],
    context: int,
    lengths: tuple[int, ...],
) -> dict[str, float]:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=16384,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval()
    seconds = {}
    for rows in batches:
        tokens = torch.ones(rows, context, dtype=torch.int64, device=device)
        cache = DynamicCache(config=config)
        for part in torch.split(
            tokens, max(1, 16384 // context)
        ):  # a whole batch's prompt at once would need more memory
            own = DynamicCache(config=config)
            model(part, past_key_values=own, logits_to_keep=1)
            _append(cache, own)
        last = tokens[:, -1:]

        def step(cache: object = cache, last: Tensor = last) -> list[int]:
            found: list[int] = model(last, past_key_values=cache).logits[:, -1].argmax(-1).tolist()
            return found

        seconds[f"decode_{rows}"] = _median(step, device)
    for length in lengths:
        tokens = torch.ones(1, length, dtype=torch.int64, device=device)

        def whole(tokens: Tensor = tokens) -> int:
            logits = model(tokens, past_key_values=DynamicCache(config=config), logits_to_keep=1).logits
            return int(logits.argmax())

        seconds[f"prompt_{length}"] = _median(whole, device)
    return seconds


def _append(cache: object, own: object) -> None:
    """Add the sequences of a cache to another."""
    for index, layer in enumerate(own.layers):  # type: ignore[attr-defined]
        if len(cache.layers) <= index or not cache.layers[index].is_initialized:  # type: ignore[attr-defined]
            cache.update(layer.keys, layer.values, index)  # type: ignore[attr-defined]
        else:
            ours = cache.layers[index]  # type: ignore[attr-defined]
            ours.keys = torch.cat([ours.keys, layer.keys])
            ours.values = torch.cat([ours.values, layer.values])


def _ours(
    shape: LlamaShape,
    device: torch.device,
    dtype: torch.dtype,
    batches: tuple[int, ...],
    context: int,
    lengths: tuple[int, ...],
) -> dict[str, float]:
    model = random_llama(shape, device, dtype).model
    blocks = -(-(context + 1) // SIZE)
    most = max(batches[-1] * blocks, lengths[-1] // SIZE)
    pool = filled_pool(shape, RESERVED_BLOCKS + most + 1, device, dtype, SIZE)
    graphs = (
        DecodeGraphs(model, pool.blocks, batches[-1], len(pool.blocks) * SIZE, cuda_capture())
        if device.type == "cuda"
        else None
    )
    part = ModelPart(model, graphs=graphs)
    seconds = {}
    for rows in batches:
        tables = [
            tuple(range(RESERVED_BLOCKS + row * blocks, RESERVED_BLOCKS + (row + 1) * blocks)) for row in range(rows)
        ]
        plan = decodes(1, [1] * rows, context + 1, tables, SIZE)
        seconds[f"decode_{rows}"] = _median(lambda plan=plan: compute(part, pool, plan), device)  # type: ignore[misc]
    for length in lengths:
        table = tuple(range(RESERVED_BLOCKS, RESERVED_BLOCKS + length // SIZE))
        plan = prompt([1] * length, 0, table, SIZE)
        seconds[f"prompt_{length}"] = _median(lambda plan=plan: compute(part, pool, plan), device)  # type: ignore[misc]
    return seconds


def _median(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, without the first two."""
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])
