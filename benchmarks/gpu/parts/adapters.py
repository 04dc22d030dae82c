"""One batch of prompts with different adapters, and one without: the tokens of merged weights on the CPU."""

import asyncio
import random
import tempfile
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from benchmarks.gpu.parts.models import BLOCK
from benchmarks.gpu.plans import greedy, prompt
from benchmarks.gpu.timing import seconds_of
from workers.config import ParallelConfig
from workers.engine.step import StepPlan
from workers.executor.adapters import RankAdapters
from workers.executor.inputs import step_arrays
from workers.executor.kv_pool import allocate_pool
from workers.executor.rank import ModelPart, compute
from workers.model.adapter import adapter_of
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.kv_layers import kv_layout
from workers.model.load import load_decoder
from workers.model.shard import shard_of
from workers.ops.attention import best_attention
from workers.request import Adapter

FAMILIES = ("llama 3", "phi 3, short", "deepseek 3, all dense")
LENGTHS, PROMPTS = (70, 33, 130, 9, 47), (None, 0, 1, 1, 2)  # the adapter of each
RANKS = (4, 17, 1)


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if the first token of a prompt differs in float32. In bfloat16 equal tokens are counted."""
    families = FAMILIES[:1] if tiny else FAMILIES
    figures: dict[str, object] = {"families": ", ".join(families)}
    equal = 0
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            wanted, found, seconds = _compare(Path(folder), family, device)
        exact, rounded = found
        if exact != wanted:
            raise AssertionError(f"{family}: {exact} instead of {wanted}")
        equal += sum(a == b for a, b in zip(rounded, wanted, strict=True))
        figures[f"{family}: step_with_adapters_time"] = seconds
    return figures | {"equal_share_bfloat16": equal / len(families) / len(LENGTHS)}


def _compare(folder: Path, family: str, device: torch.device) -> tuple[list[int], list[list[int]], float]:
    """Tokens of merged models, those of one batch in float32 and bfloat16, and its time relative to no adapters."""
    from tests.model.adapters import ALL, merged, write_adapter
    from tests.model.families import write_family

    rng = random.Random(1)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in LENGTHS]
    base = write_family(folder / "model", family)
    names = {name.split(".")[-2] for name in load_file(base / "model.safetensors")}
    targets = [each for each in ("q_a_proj", "kv_a_proj_with_mqa", "qkv_proj", "gate_up_proj", *ALL) if each in names]
    paths = [
        write_adapter(folder / f"adapter-{rank}", base, rank, rank=rank, targets=targets, alpha=8.0) for rank in RANKS
    ]
    wanted = []
    for tokens, number in zip(prompts, PROMPTS, strict=True):
        path = base if number is None else folder / f"merged-{number}"
        if number is not None and not path.exists():
            merged(base, paths[number], path)
        wanted += _first_tokens(path, torch.device("cpu"), torch.float32, tokens)
    adapters = [adapter_of(path.name, path, ModelFolder("tiny", base)) for path in paths]
    found, seconds = [], 0.0
    for dtype in (torch.float32, torch.bfloat16):
        tokens_of, seconds = _together(base, device, dtype, prompts, adapters)
        found.append(tokens_of)
    return wanted, found, seconds


def _opened(path: Path, device: torch.device, dtype: torch.dtype) -> ModelPart:
    vectors = 1 if read_model_config(path).latent else 2
    attention = best_attention(device, dtype, False, vectors)
    return ModelPart(load_decoder(ModelFolder("tiny", path), device, dtype, attention=attention))


def _first_tokens(path: Path, device: torch.device, dtype: torch.dtype, tokens: list[int]) -> list[int]:
    part = _opened(path, device, dtype)
    layout = kv_layout(part.model.config, "tiny", BLOCK, str(dtype).removeprefix("torch."))
    (answer,) = greedy(part, allocate_pool(layout, 20, device), [tokens], 1, chunk=200)
    return answer


def _together(
    path: Path, device: torch.device, dtype: torch.dtype, prompts: list[list[int]], adapters: list[Adapter]
) -> tuple[list[int], float]:
    """The prompts' first tokens in one step, and its time relative to a step without adapters."""
    part, folder = _opened(path, device, dtype), ModelFolder("tiny", path)
    config = part.model.config
    rank = RankAdapters(folder, shard_of(config, ParallelConfig(), 0), device, part.model.dtype, deterministic=False)
    for each in adapters:
        asyncio.run(rank.load(each, ()))
    layout = kv_layout(config, "tiny", BLOCK, str(dtype).removeprefix("torch."))
    chunks, next_block = [], 1
    for tokens, number in zip(prompts, PROMPTS, strict=True):
        blocks = -(-len(tokens) // BLOCK)
        (chunk,) = prompt(tokens, 0, tuple(range(next_block, next_block + blocks)), BLOCK).chunks
        chunks.append(msgspec.structs.replace(chunk, adapter="" if number is None else adapters[number].id))
        next_block += blocks
    plan, pool = StepPlan(1, tuple(chunks)), allocate_pool(layout, next_block, device)
    arrays = step_arrays(plan, BLOCK)
    without = StepPlan(1, tuple(msgspec.structs.replace(each, adapter="") for each in chunks))
    step = compute(part, pool, plan, arrays=arrays, adapters=rank.of_step(arrays))
    took_s = seconds_of(lambda: compute(part, pool, plan, arrays=arrays, adapters=rank.of_step(arrays)), device)
    return [token or 0 for token in step.tokens], took_s / seconds_of(lambda: compute(part, pool, without), device)
