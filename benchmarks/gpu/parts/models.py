"""Small models of every kind: the device's greedy tokens against the CPU's, in float32, token by token.

Decodes replay CUDA graphs where a worker's would.
"""

import concurrent.futures
import multiprocessing
import random
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.plans import greedy
from workers.executor.cuda_graphs import DecodeGraphs, cuda_capture, has_graphs
from workers.executor.kv_pool import allocate_pool
from workers.executor.rank import ModelPart
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.kv_layers import kv_layout
from workers.model.load import load_decoder
from workers.ops.attention import best_attention

FAMILIES = (
    *("llama 3", "mistral, window", "qwen 3", "gemma 2", "gemma 3", "phi 3, partial rotary", "mixtral", "qwen 2 moe"),
    *("smollm 3", "qwen 3 moe", "gpt oss", "gpt oss, mxfp4", "llama 4", "llama 4, some dense"),
    *("deepseek 2", "deepseek 3", "qwen 3 next", "qwen 3.5"),
)
LENGTHS, NEW = (70, 33, 130), 24
PROCESSES = 6  # each compiles the kernels of its families
BLOCK = 16


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a token of a float32 model differs. bfloat16 models count equal tokens: rounding may choose another."""
    families = FAMILIES[:1] if tiny else FAMILIES
    found: list[tuple[int, int, int]] = []
    wrong: list[str] = []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(families), PROCESSES), spawn) as pool:
        asked = {name: pool.submit(_compare, name, str(device), LENGTHS[: 2 if tiny else 3]) for name in families}
        for name, answer in asked.items():
            if error := answer.exception():
                wrong.append(f"{name}: {error}")
                continue
            found.append(answer.result())
            differ, total, _ = found[-1]
            wrong += [f"{name}: {differ} of {total} tokens in float32 differ from the CPU's"] * bool(differ)
    if wrong:
        raise AssertionError("; ".join(wrong))
    return {
        "families": ", ".join(families),
        "equal_tokens_float32": sum(total for _, total, _ in found),
        "equal_share_bfloat16": sum(equal for *_, equal in found) / sum(total for _, total, _ in found),
    }


def _compare(name: str, device: str, lengths: tuple[int, ...]) -> tuple[int, int, int]:
    """Tokens that differ in float32, all tokens, and those equal in bfloat16."""
    from tests.model.families import write_family

    torch.set_num_threads(1)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder) / "model", name)
        wanted = _answers(path, torch.device("cpu"), torch.float32, prompts)
        exact = _answers(path, torch.device(device), torch.float32, prompts)
        rounded = _answers(path, torch.device(device), torch.bfloat16, prompts)
    differ = sum(a != b for one, other in zip(wanted, exact, strict=True) for a, b in zip(one, other, strict=True))
    equal = sum(a == b for one, other in zip(wanted, rounded, strict=True) for a, b in zip(one, other, strict=True))
    return differ, sum(map(len, wanted)), equal


def _answers(path: Path, device: torch.device, dtype: torch.dtype, prompts: list[list[int]]) -> list[list[int]]:
    vectors = 1 if read_model_config(path).latent else 2
    attention = best_attention(device, dtype, False, vectors)
    model = load_decoder(ModelFolder("tiny", path), device, dtype, attention=attention)
    layout = kv_layout(model.config, "tiny", BLOCK, str(dtype).removeprefix("torch."))
    pool, graphs = allocate_pool(layout, 40, device), None
    if device.type == "cuda" and has_graphs(model):
        graphs = DecodeGraphs(model, pool.blocks, len(prompts), len(pool.blocks) * BLOCK, cuda_capture())
    return greedy(ModelPart(model, graphs=graphs), pool, prompts, NEW, chunk=50)
